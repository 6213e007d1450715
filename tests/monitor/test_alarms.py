"""Alarms: the user's rules and the preset's, their report by every sink, runs that they stop."""

import io
import json
import math
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hooks import no_hooks
from plain_loops import climb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from adiv_monitor import AdivError, AlarmError, Monitor, StepReport
from adiv_monitor.alarms import Alarms
from adiv_monitor.diagnosis.health import HEALTH
from adiv_monitor.report import LayerReading
from adiv_monitor.rerun.thread import function_modes
from adiv_monitor.sinks import JsonlSink, MemorySink, TableSink, TensorBoardSink
from adiv_monitor.sinks.scalars import summary_scalars


def layer(kind: str = "linear", **values: Any) -> LayerReading:
    return LayerReading(kind, 4, 8, 0, 1.0, **values)


def report(**values: float) -> StepReport:
    """Return a report of one layer per value of update_cosine, with a standard error of 0.1."""
    errors = {"update_cosine": 0.1}
    layers = {
        name.replace("_", "."): layer(update_cosine=value, standard_error=errors)
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
    assert raised("update_cosine > 0.31", made) == []
    assert raised("update_cosine > 9", report(a=math.inf)) == ["a"]
    unknown = replace(made.layers["d"], standard_error={"update_cosine": math.nan})
    assert raised("update_cosine > 0.29", replace(made, layers={"d": unknown})) == []
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
    """Return one layer per name, with its non-finite tensors."""
    return {name: layer(non_finite=what) for name, what in non_finite.items()}


def test_what_is_not_finite_raises_one_alarm_of_what_was_so_first() -> None:
    layers = unfinished(a=(), b=("gradient", "update"), c=("outputs", "gradient"))
    (alarm,) = Alarms(["non_finite"]).of(StepReport(7, layers, {}, 1.0))
    assert alarm.layer == "c" and alarm.value is None
    assert str(alarm) == (
        "non_finite: the outputs of c are NaN, infinite or too large to square; so is something "
        "of 1 more layer"
    )
    (alarm,) = Alarms(["b: non_finite"]).of(StepReport(7, layers, {}, 1.0))
    said = "b: non_finite: the gradient of b is NaN, infinite or too large to square"
    assert str(alarm) == said
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
    return StepReport(step, {"a": layer(kind, **values)}, {}, 1.0)


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


def run(kind: str, make: Any, poison: int | None = None) -> tuple[Monitor, list[str]]:
    """Run under the preset; return run and warnings. The loss is NaN from step `poison` on."""
    torch.manual_seed(0)
    model, shape = {
        "mlp": ((nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), (64, 8)),
        "cnn": (
            (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)),
            (64, 1, 8, 8),
        ),
    }[kind]
    model = nn.Sequential(*model)
    x, y = torch.randn(shape), torch.randint(3, (64,))
    optimizer, criterion = make(model.parameters()), nn.CrossEntropyLoss()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Monitor(
            model, optimizer, loss=criterion, every_n_steps=3, alarms="default"
        ) as monitor:
            for step in range(40):
                optimizer.zero_grad()
                part = slice(16 * (step % 4), 16 * (step % 4) + 16)
                loss = criterion(model(x[part]), y[part])
                (loss * (float("nan") if step == poison else 1)).backward()
                optimizer.step()
    return monitor, [str(warning.message) for warning in caught]


def sgd(lr: float, **options: Any) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def adamw(lr: float) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize(
    ("kind", "make", "poison", "rule"),
    [
        ("mlp", sgd(0.1), None, ""),
        ("mlp", adamw(0.01), None, ""),
        ("cnn", sgd(0.05, momentum=0.9), None, ""),
        ("cnn", adamw(0.003), None, ""),
        ("mlp", sgd(1e3), None, "update_ratio > 10"),
        ("mlp", sgd(1e30), None, "non_finite"),
        ("cnn", sgd(1e20), None, "non_finite"),
        ("mlp", sgd(0.1), 10, "non_finite"),
    ],
)
def test_the_preset_raises_something_over_runs_that_blow_up_alone(
    kind: str, make: Any, poison: int | None, rule: str
) -> None:
    monitor, said = run(kind, make, poison)
    raised = {alarm.rule for made in monitor.reports for alarm in made.alarms}
    assert rule in raised if rule else not raised
    assert any(rule in text for text in said) if rule else not said


# Alarms that stop


def test_it_raises_where_the_report_is_complete_and_leaves_no_hook() -> None:
    """The next optimizer step raises the error, which leaves the `with` block and no hook."""
    sink = MemorySink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AlarmError) as caught:
            climb(["1: update_cosine < 0"], on_alarm="stop", sinks=[sink])
    assert isinstance(caught.value, AdivError)
    assert not function_modes()
    (made,) = sink.reports
    assert made.step == 0 and caught.value.report == made
    assert caught.value.alarms == made.alarms and len(made.alarms) == 1
    assert str(caught.value) == f"step 0: {made.alarms[0]}"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.report, str(copied)) == (made, str(caught.value))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def take(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    model.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("place", ["step", "complete_report", "latest", "end_step", "compiled"])
def test_it_raises_wherever_a_report_is_completed(place: str, on_error: Any) -> None:
    model, optimizer = model_and_optimizer()
    rules = [lambda path, reading: path == "0"]
    options: Any = {"alarms": rules, "on_alarm": "stop", "every_n_steps": 1, "on_error": on_error}
    followed = None if place == "end_step" else optimizer
    called = torch.compile(model, backend="eager") if place == "compiled" else model
    monitor = Monitor(model, followed, **options)
    monitor.attach()
    take(called, followed)
    if place in ("step", "compiled"):
        take(called, None)  # up to the optimizer's step nothing is raised
    with pytest.raises(AlarmError):
        if place == "complete_report":
            monitor.complete_report()
        elif place == "latest":
            _ = monitor.latest
        elif place == "end_step":
            monitor.end_step()
        else:
            optimizer.step()
    assert no_hooks(model, optimizer), "though nobody has closed it yet"
    assert monitor.step == 1 and len(monitor.reports) == 1
    take(model, optimizer)
    assert len(monitor.reports) == 1, "it measures nothing more"
    monitor.close()
    with pytest.raises(AdivError, match="closed"):
        monitor.attach()


def test_the_last_reports_alarms_warn_where_the_monitor_is_closed() -> None:
    model, optimizer = model_and_optimizer()
    sink = MemorySink()
    options: Any = {"alarms": ["0: update_ratio > 0"], "on_alarm": "stop", "sinks": [sink]}
    with (
        pytest.warns(UserWarning, match="step 0: 0: 0: update_ratio > 0"),
        Monitor(model, optimizer, **options) as monitor,
    ):
        take(model, optimizer)
    assert [len(made.alarms) for made in sink.reports] == [1]
    assert monitor.latest == sink.reports[0]
    assert no_hooks(model, optimizer)
