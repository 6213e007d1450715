"""The page of a running training, from its reports alone."""

from collections.abc import Sequence

from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.verdict import (
    looked_for,
    loss_words,
    running_headline,
    until,
    untold,
)
from adiv_monitor.pages.drives import drives
from adiv_monitor.pages.heat import heat_map, heat_measures
from adiv_monitor.pages.layers import layer_table, worst
from adiv_monitor.pages.pictures import cosine_picture, loss_picture
from adiv_monitor.pages.render import render
from adiv_monitor.pages.report_page import (
    alignment_table,
    attention_table,
    last_with_direction,
    notes_of,
    strengths_of,
)
from adiv_monitor.report.wording import not_measured


def running_page(
    record: Record, findings: Sequence[Finding], count: int, alarms: Sequence[object] = ()
) -> str:
    """Return a self-contained HTML page of a training so far.

    Args:
        record: record with at least one report, and no facts of an audit.
        findings: findings of the rules in the record.
        count: number of measured steps; the record may hold fewer reports.
        alarms: alarms that rules of the user's have raised.

    Returns:
        The text of the file, to be written as UTF-8.

    Raises:
        ImportError: the package jinja2 or matplotlib is missing.
    """
    reports = record.reports
    last = last_with_direction(reports) or reports[-1]
    return render(
        "running.html",
        title=f"Training up to step {reports[-1].step:,}",
        record=record,
        findings=findings,
        headline=running_headline(findings, record),
        strengths=strengths_of(findings),
        count=count,
        alarms=[str(alarm) for alarm in alarms],
        newest=reports[-1],
        last=last,
        looked_for=looked_for(record, findings),
        until=until(record),
        untold=untold(record),
        loss_words=loss_words(record),
        loss_picture=loss_picture(record, ()) if len(record.losses) > 1 else None,
        not_measured=not_measured(last),
        notes=notes_of(record),
        worst=worst(last),
        drives=drives(last),
        cosine_picture=cosine_picture(reports),
        heat=heat_map(record, heat_measures(record, findings)),
        layers=layer_table(last),
        attention=attention_table(last),
        alignment=alignment_table(last),
        anchors={path: i for i, path in enumerate(last.layers)},
    )
