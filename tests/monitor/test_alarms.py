"""Users' alarm rules: the layers for which they hold, and their report by every sink."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from plain_loops import climb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adiv_monitor import StepReport
from adiv_monitor.alarms import Alarms
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.report import LayerReading
from adiv_monitor.sinks import JsonlSink, TableSink, TensorBoardSink
from adiv_monitor.sinks.scalars import summary_scalars


def report(**values: float) -> StepReport:
    """Return a report of one layer per value of update_cosine, with a standard error of 0.1."""
    layers = {
        name.replace("_", "."): LayerReading(
            *("linear", 4, 8, 0, 1.0), update_cosine=value, standard_error={"update_cosine": 0.1}
        )
        for name, value in values.items()
    }
    return StepReport(7, layers, {}, 1.0)


def raised(rule: Any, made: StepReport) -> list[str]:
    return [alarm.layer for alarm in Alarms([rule]).of(made)]


def test_a_rule_holds_beyond_two_standard_errors() -> None:
    made = report(a=-0.19, b=-0.21, c=float("nan"), d=0.5)
    assert raised("update_cosine < 0", made) == ["b"]
    assert raised("update_cosine <= 0.4", made) == ["a", "b"]
    assert raised("update_cosine > 0.29", made) == ["d"]
    assert raised("scale_cv > 0", made) == [], "a measure that was not taken"


def test_a_rule_may_be_for_some_layers() -> None:
    made = report(encoder_a=-1.0, encoder_b=0.9, head=-1.0)
    assert raised("encoder.*: update_cosine < 0", made) == ["encoder.a"]
    assert raised(lambda path, reading: reading.update_cosine < 0, made) == ["encoder.a", "head"]


def test_it_warns_once_for_each_rule_and_layer() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = climb(["update_cosine < 0", "1: parameter_cosine < 0"])
    said = [str(warning.message) for warning in caught]
    assert [text.rpartition(":")[0] for text in said] == [
        "adiv_monitor: step 0: 0: update_cosine < 0",
        "adiv_monitor: step 0: 1: update_cosine < 0",
        "adiv_monitor: step 0: 1: 1: parameter_cosine < 0",
    ]
    assert [len(made.alarms) for made in monitor.reports] == [3, 3, 3]


def test_a_function_that_fails_is_said_and_nothing_is_lost() -> None:
    def fails(path: str, reading: LayerReading) -> bool:
        return 1 / 0 > 0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = climb([fails, "1: update_cosine < 0"])
    assert [len(made.layers) for made in monitor.reports] == [2, 2, 2]
    assert [len(made.alarms) for made in monitor.reports] == [1, 1, 1], "of the other rule"
    for made in monitor.reports:
        assert any("fails failed: ZeroDivisionError" in note for note in made.notes)
    assert sum("ZeroDivisionError" in str(warning.message) for warning in caught) == 1


def test_every_sink_tells_them(tmp_path: Path) -> None:
    table = io.StringIO()
    sinks = [TableSink(file=table), JsonlSink(tmp_path / "run.jsonl"), TensorBoardSink(tmp_path)]
    with pytest.warns(UserWarning):
        latest = climb(["1: update_cosine < 0"], sinks=sinks).latest
    assert latest is not None
    (alarm,) = latest.alarms
    assert alarm.layer == "1" and alarm.value == latest.layers["1"].update_cosine
    assert table.getvalue().count(f"alarm: {alarm}") == 1
    record = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert StepReport.from_dict(record).alarms == latest.alarms
    assert summary_scalars(latest, ["update_cosine"])["adiv.summary/alarms"] == 1
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    assert "adiv.summary/alarms/text_summary" in events.Tags()["tensors"]


def test_a_rule_that_finds_nothing_to_compare_is_said_once() -> None:
    """A rule on a layer or measure that no report has is reported once."""
    for options in ({}, {"layers_per_step": 1}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rules = ["decoder.*: scale_cv > 1e9", "attainable_cosine < -2", "1: scale_cv > 1e9"]
            monitor = climb(rules, **options)
        said = [str(warning.message) for warning in caught]
        step = 0 if not options else 1  # after one round
        assert [text.partition(" up to")[0] for text in said] == [
            "adiv_monitor: the alarm 'decoder.*: scale_cv > 1e9' has found nothing to compare",
            "adiv_monitor: the alarm 'attainable_cosine < -2' has found nothing to compare",
        ]
        assert all(f"up to step {step}: " in text for text in said)
        assert not any(made.alarms for made in monitor.reports)


def unfinished(**non_finite: tuple[str, ...]) -> dict[str, LayerReading]:
    """Return a report of one layer per name, with its non-finite tensors."""
    return {
        name.replace("_", "."): LayerReading(*("linear", 4, 8, 0, 1.0), non_finite=what)
        for name, what in non_finite.items()
    }


def test_what_is_not_finite_raises_one_alarm_of_what_was_so_first() -> None:
    layers = unfinished(a=(), b=("gradient", "update"), c=("outputs", "gradient"))
    (alarm,) = Alarms(["non_finite"]).of(StepReport(7, layers, {}, 1.0))
    assert alarm.layer == "c" and alarm.value is None
    assert str(alarm) == (
        "non_finite: the outputs of c are NaN, infinite or too large to square; so is something "
        "of 1 more layer"
    )
    (alarm,) = Alarms(["b: non_finite"]).of(StepReport(7, layers, {}, 1.0))
    assert str(alarm) == (
        "b: non_finite: the gradient of b is NaN, infinite or too large to square"
    )
    assert Alarms(["a: non_finite"]).of(StepReport(7, layers, {}, 1.0)) == ()
    made = StepReport(7, {}, {}, 1.0, alarms=(alarm,))
    assert StepReport.from_dict(made.to_dict()) == made


def test_a_loss_that_is_not_finite_is_an_alarm_of_no_layer() -> None:
    fine, nan = unfinished(a=()), float("nan")
    for losses, layers, said in (
        ({5: 1.0, 6: nan, 7: nan}, unfinished(a=("inputs",)), "the loss of step 6 is nan"),
        ({7: float("inf")}, unfinished(a=("gradient",)), "the loss of step 7 is inf"),
        ({7: nan}, unfinished(a=("outputs",)), "the outputs of a are NaN"),
        ({7: nan}, fine, "the loss of step 7 is nan"),
    ):
        made = StepReport(7, layers, {}, 1.0, losses=losses)
        (alarm,) = Alarms(["non_finite"]).of(made)
        assert alarm.non_finite.startswith(said)
        assert not Alarms(["b: non_finite"]).of(made), "it is of no layer"
    assert Alarms(["non_finite"]).of(StepReport(7, fine, {}, 1.0, losses={7: 1.0})) == ()


def read(step: int, kind: str = "linear", **values: float) -> StepReport:
    return StepReport(step, {"a": LayerReading(kind, 4, 8, 0, 1.0, **values)}, {}, 1.0)  # type: ignore[arg-type]


def test_the_preset_is_made_of_what_healthy_layers_read() -> None:
    """A far too large step lies beyond the outermost knot of the preset's table."""
    far = HEALTH["update_ratio"].knots[-1][0]
    inf = float("inf")
    for made, rules in (
        (read(3, update_ratio=far * 1.01), [f"update_ratio > {far:g}"]),
        (read(3, update_ratio=far * 0.99), []),
        (read(3, update_ratio=inf), []),
        (read(3, kind="gain", update_ratio=far * 9), []),
        (read(0, projection_cosine=-0.1), ["projection_cosine < 0"]),
        (read(0, projection_cosine=0.1), []),
        (StepReport(3, {}, {}, 1.0, losses={3: inf}), ["non_finite"]),
    ):
        assert [alarm.rule for alarm in Alarms("default").of(made)] == rules
        assert [alarm.rule for alarm in Alarms(["default"]).of(made)] == rules
    alarms = Alarms(["scale_cv > 1", "default"])
    alarms.of(StepReport(0, {}, {}, 1.0))
    assert alarms.idle == ("scale_cv > 1",), "of the preset nothing is said"
