"""The page of one audit report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from adiv_monitor.diagnosis import own_run
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import STRENGTHS, Finding, outcome
from adiv_monitor.diagnosis.hidden import without_secrets
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.drives import drives
from adiv_monitor.pages.findings import (
    all_trials,
    checks,
)
from adiv_monitor.pages.heat import heat_map, heat_measures
from adiv_monitor.pages.layers import layer_table, worst
from adiv_monitor.pages.pictures import cosine_picture, loss_picture
from adiv_monitor.pages.render import render
from adiv_monitor.report import ALIGNMENT_MEASURES, ATTENTION_MEASURES, StepReport, taken
from adiv_monitor.report.wording import cell, not_measured


def page(report: Diagnosis) -> str:
    """Return a report as a self-contained HTML page, which makes no network requests.

    Args:
        report: diagnosis of an audit.

    Returns:
        The text of the file, to be written as UTF-8.

    Raises:
        ImportError: the package jinja2 or matplotlib is missing.
    """
    record = report.record
    last = last_with_direction(record.reports)
    trials = all_trials(report.findings, record)
    layers = None if last is None else layer_table(last)
    return render(
        "report.html",
        title=f"Audit of {record.facts.model}",
        report=report,
        record=record,
        facts=record.facts,
        findings=report.findings,
        headline=headline(report.findings, record),
        strengths=strengths_of(report.findings),
        checks=checks(report.findings, record),
        last=last,
        not_measured=[] if last is None else not_measured(last),
        notes=notes_of(record),
        worst=[] if last is None else worst(last),
        drives=None if last is None else drives(last),
        cosine_picture=cosine_picture(record.reports),
        loss_picture=loss_picture(record, trials) if record.losses else None,
        trials=trials,
        changes=_changes(record),
        heat=heat_map(record, heat_measures(record, report.findings)),
        layers=layers,
        anchors={} if last is None else {path: i for i, path in enumerate(last.layers)},
        attention=None if last is None else attention_table(last),
        alignment=None if last is None else alignment_table(last),
        settings=settings(record),
        outcome=outcome,  # pages of runs without trials do not pass it
    )


def headline(findings: Sequence[Finding], record: Record) -> str:
    """Return the number of findings to fix or to watch, in words.

    If the copy does not train as the user's run did, the headline says so, since findings in the
    copy, or their absence, may not apply to the run.
    """
    differs = "the copy does not train as your run did" if own_run.difference(record) else ""
    counts = Counter(finding.strength for finding in findings)
    if counts["act"]:
        things = "one thing" if counts["act"] == 1 else f"{counts['act']} things"
        also = f", and {differs}" if differs else ""
        return f"{things[0].upper()}{things[1:]} to fix{also}"
    if differs:
        return f"{differs[0].upper()}{differs[1:]}"
    if counts["watch"]:
        things = "one thing" if counts["watch"] == 1 else f"{counts['watch']} things"
        return f"Nothing to fix, {things} to watch"
    return "Nothing to fix"


def settings(record: Record) -> dict[str, str]:
    """Return facts about the model and the run by name, in printable form."""
    facts = record.facts
    hidden = without_secrets(facts.settings)
    optimizer = ", ".join(f"{name} {_plain(value)}" for name, value in hidden.items())
    clip = "not clipped" if facts.clip_norm is None else f"clipped to {facts.clip_norm:g}"
    again = ", repeated" if facts.batches < facts.steps else ""
    seconds = facts.seconds_per_step
    return {
        "Model": facts.model,
        "Parameters": f"{facts.parameters:,}, of which {facts.trainable:,} are trained",
        "Optimizer": f"{facts.optimizer} ({optimizer})" if optimizer else facts.optimizer,
        "Gradients": clip,
        "Loss": facts.loss or "the model's own",
        **({"Data": f"{facts.data}, batches of {facts.batch_size:,}"} if facts.data else {}),
        "Batches": f"{facts.batches:,} of {facts.batch_size:,} samples{again}",
        "Steps": f"{len(record.losses):,} of {facts.steps:,}, "
        + ("all" if facts.every_n_steps == 1 else f"one of every {facts.every_n_steps}")
        + " measured",
        "Seed": f"{facts.seed}",
        "Device": facts.device,
        "torch": facts.torch,
        "Time of a step": "–"
        if math.isnan(seconds)
        else f"{seconds * 1000:.3g} ms without measuring",
    }


def introduced(record: Record, name: str = "") -> str:
    """Return model, data, loss, optimizer and learning rate of an audit, in one line.

    Args:
        record: the record of the audit.
        name: the name by which its user calls the model; "": that of its class.
    """
    facts = record.facts
    model = f"{name} ({facts.model.rpartition('.')[2]})" if name else facts.model
    is_random = facts.data.partition(":")[0] == "random"
    data = "random data" if is_random else f"real data ({facts.data or 'batches'})"
    rates = record.reports[0].learning_rates if record.reports else ()
    rates = tuple(sorted(set(rates or filter(None, [facts.settings.get("lr")]))))
    said = " to ".join(f"{rate:.3g}" for rate in dict.fromkeys((*rates[:1], *rates[-1:])))
    return " · ".join((
        f"{model}, {facts.trained}" if facts.trained else model,
        data,
        f"loss {facts.loss}" if facts.loss else "the model's own loss",
        f"{facts.optimizer}, learning rate{'s' * (len(rates) > 1)} {said or 'not known'}",
    ))  # fmt: skip


def _changes(record: Record) -> list[dict[str, float]]:
    """Return expected and realised change of the loss at the measured steps."""
    changes = []
    for report in record.reports:
        realised = record.realised.get(report.step, report.realised_loss_change)
        if realised is None or report.step >= len(record.losses):
            continue
        expected = math.nan if report.descent is None else -report.descent
        changes.append(
            {
                "step": report.step,
                "loss": record.losses[report.step],
                "expected": expected,
                "realised": realised,
            }
        )
    return changes


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def last_with_direction(reports: Sequence[StepReport]) -> StepReport | None:
    """Return the last report in which a layer has a direction, else the last one."""
    for report in reversed(reports):
        values = (reading.update_cosine for reading in report.layers.values())
        if any(value is not None and math.isfinite(value) for value in values):
            return report
    return reports[-1] if reports else None


def is_taken(reports: Sequence[StepReport], measure: str) -> bool:
    """Return whether some layer has the measure at some step."""
    return any(taken(report, (measure,)) for report in reports)


def strengths_of(findings: Sequence[Finding]) -> Mapping[str, int]:
    """Return the number of findings of each strength."""
    return {strength: sum(f.strength == strength for f in findings) for strength in STRENGTHS}


def notes_of(record: Record) -> list[str]:
    """Return the notes of the record and of its reports, each once."""
    notes = [*record.notes, *(note for report in record.reports for note in report.notes)]
    return list(dict.fromkeys(notes))


def attention_table(report: StepReport) -> dict[str, Any] | None:
    """Return a table with a row per attention module; None if none was measured."""
    if not report.attention:
        return None
    measures = taken(report, ATTENTION_MEASURES)
    rows = [
        (
            path,
            f"{reading.samples_seen:,} of {reading.samples_total:,}",
            [cell(reading, measure) for measure in measures],
        )
        for path, reading in report.attention.items()
    ]
    return {"measures": measures, "rows": rows}


def alignment_table(report: StepReport) -> dict[str, Any] | None:
    """Return a table with a row per layer of the probe; None if no probe was requested."""
    if not report.alignment:
        return None
    rows = [
        (
            path,
            f"{reading.role}, {reading.kind}, {reading.fan_in:,} → {reading.fan_out:,}",
            [getattr(reading, measure) for measure in ALIGNMENT_MEASURES],
        )
        for path, reading in report.alignment.items()
    ]
    return {"measures": ALIGNMENT_MEASURES, "rows": rows}
