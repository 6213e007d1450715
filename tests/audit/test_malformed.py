"""Changed reports are read and shown, or refused in one clear line."""

import copy
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from example_audits import findings, record, trial
from example_reports import attention, reading, report

from adiv_monitor.audit.command.cli import main
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.record import ActivatedOutput
from adiv_monitor.report import Alarm, AlignmentReading, StepReport, Turn
from adiv_monitor.sinks import TableSink

pytest.importorskip("rich")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from adiv_monitor.pages import compare, page

ABSENT = object()
WRONG = (
    *(ABSENT, None, True, -1, 0, 1.5, 10**400, 1e308, -1e308, "NaN", "Infinity", "-Infinity"),
    *("", "text", "\x00", [], ["text"], [[[]]], {}, {"text": 1}, {"text": {"text": []}}),
)


def step_report(step: int = 0) -> StepReport:
    """Return a report with one layer and every field."""
    errors = {"update_cosine": 0.02}
    aligned = AlignmentReading("hidden", "linear", 4, 8, ("a",), 16, 0.5, 0.5, 0.5, 0.5, 1.0)
    return report(
        step,
        layers={"a": reading(step, features=4, standard_error=errors, scale_quantiles=(0.1, 0.2))},
        unmeasured={"decoder.lstm.weight_ih_l0": 8192},
        attention={"attends": attention(step)},
        realised_loss_change=-0.1,
        realised_loss_changes=(-0.1, -0.2),
        alignment={"a": aligned},
        alarms=(Alarm("scale_cv > 1", "a", 2.0, 0.1),),
        turn=Turn(1, 1, 1, 4),
        interval=10,
    )


@cache
def audit() -> AuditReport:
    losses, norms = [2.0, 1.5, 1.2, 1.0], [1.0, 0.9, 0.8, 0.7]
    run = record((step_report(0), step_report(2)), losses, norms)
    run = replace(
        run,
        activated_output=ActivatedOutput("relu", "a"),
        rates={0.1: trial("rate*0.1", 4, losses, 1.1)},
        first_non_finite="loss",
        parameter_norms=(1.0, 1.1, 1.2, 1.3),
        double_softmax=False,
        descent_share=1.0,
    )
    return AuditReport(findings(["a"], losses)[:2], run)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested data; of a list, that of its first item."""
    yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value[:1]):
            yield from places(item, (*at, i))


def changed(value: Any, at: tuple[Any, ...], wrong: Any) -> Any:
    """A copy with something else at a place; a key of no object where that is its name."""
    if not at:
        return wrong
    value = copy.deepcopy(value)
    inside = value
    for key in at[:-1]:
        inside = inside[key]
    if wrong is ABSENT:
        del inside[at[-1]]
    else:
        inside[at[-1]] = wrong
    return value


def plain() -> Any:
    return json.loads(audit().to_json())


def test_each_is_read_or_refused_in_one_line(whole: bool) -> None:
    base, refused, read = plain(), 0, 0
    every = 1 if whole else 3  # of these places
    for at in islice(places(base), 0, None, every):
        for wrong in WRONG:
            if wrong is ABSENT and not at:
                continue
            try:
                AuditReport.from_dict(changed(base, at, wrong))
                read += 1
            except ValueError as error:
                assert re.fullmatch(r"AuditReport.*: got .*, expected .*", str(error)), error
                assert len(str(error)) < 300
                refused += 1
    assert refused > 2 * read > 1000 / every


def test_a_step_report_is_read_or_refused_in_one_line() -> None:
    base, refused = step_report().to_dict(quantiles=True), 0
    for at in places(base):
        for wrong in WRONG:
            if wrong is ABSENT and not at:
                continue
            try:
                StepReport.from_dict(changed(base, at, wrong))
            except ValueError as error:
                assert re.fullmatch(r"StepReport: .*got .*, expected .*", str(error)), error
                refused += 1
    assert refused > 1000


def shown(found: AuditReport) -> None:
    """Make the page, tables and rows of a report."""
    page(found)
    compare(audit(), found, ("a", "b"))
    for one in found.record.reports:
        TableSink(file=io.StringIO()).write(one)
        assert one.to_rows() is not None and one.alignment_rows() is not None
        one.attention_rows()


@pytest.mark.slow(one_in=40)
@pytest.mark.parametrize("part", range(40))
def test_what_is_read_is_shown(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its pictures, which take seconds."""
    for module, picture in (
        ("report_page", "loss_picture"),
        ("compare_page", "two_losses"),
    ):
        name = f"adiv_monitor.pages.{module}"
        monkeypatch.setattr(sys.modules[name], picture, lambda *_: None)
    base, count = plain(), 0
    for at in list(places(base))[1 + part :: 40]:
        for wrong in WRONG:
            try:
                found = AuditReport.from_dict(changed(base, at, wrong))
            except ValueError:
                continue
            shown(found)
            count += 1
    assert count


@pytest.mark.slow(one_in=5)
@pytest.mark.parametrize("wrong", [1e308, -1e308, "Infinity", "NaN"])
@pytest.mark.parametrize(
    "at",
    [
        ("record", "losses", 3),
        ("record", "gradient_norms", 0),
        ("record", "chance"),
        ("record", "facts", "clip_norm"),
        ("record", "rates", "0.1", "loss"),
        ("record", "reports", 0, "layers", "a", "standard_error", "update_cosine"),
    ],
)
def test_pictures_of_what_is_far_off(at: tuple[Any, ...], wrong: object) -> None:
    shown(AuditReport.from_dict(changed(plain(), at, wrong)))


def test_an_error_says_where_and_what_is_expected() -> None:
    wrong = changed(plain(), ("record", "reports", 0, "layers", "a", "rows_seen"), 1.5)
    told = (
        "AuditReport: record.reports[0].layers['a'].rows_seen: got 1.5, expected a whole number of "
        "64 bits"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        AuditReport.from_dict(wrong)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "3", "{", "", "\x00", "\ufeff", '{"schema": 3}'),
        *("[" * 100_000, '{"schema": ' + "1" * 5000 + "}"),
    ],
)
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        AuditReport.from_json(text)


def test_settings_that_are_nested_without_end_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    wrong = plain()
    wrong["record"]["facts"]["settings"] = {"lr": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        AuditReport.from_dict(wrong)


def test_compare_tells_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(changed(plain(), ("record", "losses"), "text")))
    assert main(["compare", str(file), str(file), "--out", str(tmp_path / "page")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "record.losses: got 'text', expected a list" in told
