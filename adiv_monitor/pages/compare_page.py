"""The page that compares two reports side by side."""

import base64
import math
from itertools import chain
from typing import NamedTuple

from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.health import GRADIENT, measure_title
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.findings import checks, significant
from adiv_monitor.pages.layers import NAMED, Cell
from adiv_monitor.pages.pictures import loss_picture
from adiv_monitor.pages.render import render
from adiv_monitor.pages.report_page import headline, last_with_direction, settings
from adiv_monitor.pictures.grid import grid
from adiv_monitor.pictures.heat import heat_picture
from adiv_monitor.report import WORST, LayerReading, StepReport
from adiv_monitor.report.plain import without_secrets
from adiv_monitor.report.wording import number

# Measures that are drawn side by side.
_DRAWN = ("update_ratio", GRADIENT, "update_cosine")


class Pair(NamedTuple):
    """A measure of one layer in both reports.

    Attributes:
        a: value in the first report.
        b: value in the second report.
        difference: second minus first.
        differs: whether they differ by more than two combined errors, and more than rounding.
        verdict: "better" or "worse" if `differs` and the measure has a bad end, else "".
    """

    a: Cell
    b: Cell
    difference: Cell
    differs: bool
    verdict: str


def compare(a: Diagnosis, b: Diagnosis, names: tuple[str, str]) -> str:
    """Return a self-contained HTML page that compares two reports side by side.

    Layers are matched by path. They are compared at the last step that was measured in both runs,
    or if there is none, each at its own last step.

    Args:
        a: the first report.
        b: the second report.
        names: names of the reports, e.g. their folders.

    Returns:
        The text of the file, to be written as UTF-8.

    Raises:
        ImportError: the package jinja2 or matplotlib is missing.
    """
    first, second = _steps(a, b)
    of_a, of_b = ({} if x is None else dict(x.layers) for x in (first, second))
    shared = [path for path in of_a if path in of_b]
    measures = [
        measure for measure in NAMED if any(getattr(of_a[p], measure) is not None for p in shared)
    ]
    rows = [(p, [_pair(of_a[p], of_b[p], measure) for measure in measures]) for p in shared]
    facts = [_settings(report) for report in (a, b)]
    both = [(n, *(f.get(n, "not known") for f in facts)) for n in dict.fromkeys(chain(*facts))]
    return render(
        "compare.html",
        title=f"{names[0]} and {names[1]}",
        names=names,
        runs=[_run(report) for report in (a, b)],
        steps=[None if report is None else report.step for report in (first, second)],
        measures=measures,
        rows=rows,
        only=([p for p in of_a if p not in of_b], [p for p in of_b if p not in of_a]),
        settings=[row for row in both if row[1] != row[2]],
        same=[name for name, of_a, of_b in both if of_a == of_b],
        picture=loss_picture(a.record, b.record) if a.record.losses or b.record.losses else None,
        maps=_maps(a.record, b.record),
    )


def _run(report: Diagnosis) -> dict[str, object]:
    record, findings = report.record, report.findings
    return {
        "headline": headline(findings, record),
        "verdict": report.verdict if record.is_audited else "",
        "loss": _loss(record),
        "findings": findings,
        "checks": checks(findings, record),
    }


def _loss(record: Record) -> str:
    """Return the first and the last loss with their steps, in words."""
    if not record.losses:
        return "Loss not known"
    steps = record.steps_of_losses
    ends = f"{significant(record.losses[0])} → {significant(record.losses[-1])}"
    return f"Loss {ends}, steps {steps[0]:,} to {steps[-1]:,}"


def _maps(*records: Record) -> list[tuple[str, list[str]]]:
    """Return measure → heat map of layers by steps for each run, as a data URL.

    Each measure has the same colours in all runs. The URL is "" for a run without the measure.
    """
    found = []
    for measure in _DRAWN:
        grids = [grid(record, measure) for record in records]
        if any(grids):
            pngs = [one and base64.b64encode(heat_picture(one).png()).decode() for one in grids]
            urls = [f"data:image/png;base64,{png}" if png else "" for png in pngs]
            found.append((measure_title(measure), urls))
    return found


def _steps(a: Diagnosis, b: Diagnosis) -> tuple[StepReport | None, StepReport | None]:
    """Return the last step that was measured in both runs, if any, else the last of each."""
    of_a = {report.step: report for report in a.record.reports}
    of_b = {report.step: report for report in b.record.reports}
    if both := of_a.keys() & of_b.keys():
        # A last step without any direction is not informative.
        last = last_with_direction([of_a[step] for step in sorted(both)])
        if last is not None:
            return last, of_b[last.step]
    return last_with_direction(a.record.reports), last_with_direction(b.record.reports)


def _settings(report: Diagnosis) -> dict[str, str]:
    """Return the settings of a run, those of the optimizer one by one, without the step's time.

    For a training that is known from its reports only, return the facts in these.
    """
    record, reports = report.record, report.record.reports
    if record.is_audited:
        chosen = settings(record) | {"Optimizer": record.facts.optimizer}
        del chosen["Time of a step"]
        of_optimizer = without_secrets(record.facts.settings)
        return chosen | {f"Optimizer: {name}": f"{value}" for name, value in of_optimizer.items()}
    found = {"Measured": f"steps {reports[0].step:,} to {reports[-1].step:,}"} if reports else {}
    rates = [", ".join(f"{r:g}" for r in x.learning_rates) for x in reports if x.learning_rates]
    if rates:
        found["Optimizer: lr"] = " → ".join(dict.fromkeys((rates[0], rates[-1])))
    return found


def _pair(a: LayerReading, b: LayerReading, measure: str) -> Pair:
    x, y = getattr(a, measure), getattr(b, measure)
    errors = [r.standard_error.get(measure, 0.0) for r in (a, b)]
    error = math.hypot(*errors)
    difference = None if x is None or y is None else y - x
    differs = difference is not None and (
        abs(difference) > 2 * error and not math.isclose(x, y, rel_tol=1e-6)
    )
    verdict = ""
    if differs and measure in WORST:
        verdict = "better" if (y > x) == (WORST[measure] == "min") else "worse"
    return Pair(
        _cell(x, errors[0]), _cell(y, errors[1]), _cell(difference, error), differs, verdict
    )


def _cell(value: float | None, error: float) -> Cell:
    if value is None:
        return Cell("", None)
    return Cell(number(value, error), value if math.isfinite(value) else None)
