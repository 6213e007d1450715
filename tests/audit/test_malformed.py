"""Changed reports are read and shown, or refused in one clear line."""

import copy
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from example_audits import findings, record, trial
from example_reports import attention, reading, report

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.record import ActivatedOutput
from adiv_monitor.report import Alarm, AlignmentReading, StepReport, Turn
from adiv_monitor.sinks import TableSink

pytest.importorskip("rich")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from adiv_monitor.pages import compare, digest, page

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
        layers={"a": reading(step, features=4, standard_error=errors)},
        unmeasured={"decoder.lstm.weight_ih_l0": 8192},
        attention={"attends": attention(step)},
        realised_loss_change=-0.1,
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
        descent_share=1.0,
    )
    return AuditReport(findings(["a"], losses)[:2], run)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested data; of a list, that of its first item."""
    yield at
    items = value.items() if isinstance(value, dict) else []
    for key, item in [*items, *(enumerate(value[:1]) if isinstance(value, list) else ())]:
        yield from places(item, (*at, key))


def changed(value: Any, at: tuple[Any, ...], wrong: Any) -> Any:
    """A copy with something else at a place, or without that place."""
    if not at:
        return wrong
    value = inside = copy.deepcopy(value)
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = wrong
    if wrong is ABSENT:
        del inside[at[-1]]
    return value


def plain() -> Any:
    return json.loads(audit().to_json())


def test_each_is_read_or_refused_in_one_line(whole: bool) -> None:
    base, steps = plain(), step_report().to_dict()
    every = 1 if whole else 20  # of these places
    given: list[Any] = [(AuditReport, base, at) for at in list(places(base))[::every]]
    given += [(StepReport, steps, at) for at in list(places(steps))[::every]]
    read = refused = 0
    for kind, data, at in given:
        for wrong in WRONG[not at :]:
            try:
                kind.from_dict(changed(data, at, wrong))
                read += 1
            except ValueError as error:
                assert re.fullmatch(rf"{kind.__name__}.*: .*got .*, expected .*", str(error)), error
                assert len(str(error)) < 300
                refused += 1
    assert refused > 2 * read > 1000 / every


@pytest.mark.slow(one_in=320)
@pytest.mark.parametrize("part", range(320))
def test_what_is_read_is_shown(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its pictures, which take seconds."""
    monkeypatch.setattr("adiv_monitor.pages.report_page.loss_picture", lambda *_: None)
    monkeypatch.setattr("adiv_monitor.pages.compare_page.loss_picture", lambda *_: None)
    base = plain()
    for at in list(places(base))[1 + part :: 320]:
        for wrong in WRONG:
            try:
                found = AuditReport.from_dict(changed(base, at, wrong))
            except ValueError:
                continue
            shown(found)


def shown(found: AuditReport) -> None:
    """Make the pages, tables and rows of a report."""
    assert page(found) and digest(found) and compare(audit(), found, ("a", "b"))
    for one in found.record.reports:
        TableSink(file=io.StringIO()).write(one)
        assert one.to_rows() is not None
        one.attention_rows()


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "{", "", "\x00", "\ufeff", '{"schema": 3}', '{"schema": ' + "1" * 5000 + "}"],
)
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        AuditReport.from_json(text)
