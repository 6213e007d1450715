"""A report as short Markdown to paste: the text of the page, without its pictures."""

from collections.abc import Iterable, Iterator, Sequence

from adiv_monitor.diagnosis.diagnose import finding_title, follows, reason, what_happens
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import Evidence, Finding
from adiv_monitor.diagnosis.health import measure_title
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.findings import checks, significant
from adiv_monitor.pages.layers import worst_lines
from adiv_monitor.pages.report_page import (
    headline,
    introduced,
    last_with_direction,
    notes_of,
    settings,
    titled,
)
from adiv_monitor.printable import code, markdown
from adiv_monitor.report.wording import listed, not_measured, percent

MARK = "<!-- written by adiv-monitor -->"  # identifies files that this package wrote
# Limits that keep every digest below 200 lines.
_MOST_FINDINGS = 5  # findings in full
_MOST_OTHERS = 12  # findings by name only
_MOST_FIXES = 4
_MOST_EVIDENCE = 3
_MOST_NOTES = 6
_MOST_ALARMS = 10
_MOST_LOSSES = 8


def digest(report: Diagnosis, count: int | None = None, alarms: Iterable[object] = ()) -> str:
    """Return verdict, evidence, fixes, open questions, settings, loss and worst layers.

    The text has at most 200 lines of Markdown.

    Args:
        report: diagnosis of an audit, or of a training that is known from its reports.
        count: number of measured steps, if the record may hold fewer reports.
        alarms: alarms that rules of the user's have raised.
    """
    record, findings = report.record, report.findings
    known = settings(record) if record.is_audited else {}
    parts = [
        [MARK, *_head(report, len(record.reports) if count is None else count)],
        _some("Alarms", [f"- {markdown(str(alarm))}" for alarm in alarms], _MOST_ALARMS),
        *_findings(findings, record.is_audited),
        _listed(
            "What was looked for",
            [f"- {c.title}: {markdown(c.state)}" for c in checks(findings, record)],
        ),
        _measured(record),
        _listed("Settings", [f"- {name}: {markdown(value)}" for name, value in known.items()]),
        _losses(record),
        _worst(record),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(report: Diagnosis, count: int) -> Iterator[str]:
    record, findings = report.record, report.findings
    is_audited = record.is_audited
    yield f"# Audit of {code(record.facts.model)}" if is_audited else f"# {titled(record)}"
    steps = f"{count:,} step{'' if count == 1 else 's'} measured."
    if is_audited:
        yield f"\n{markdown(introduced(record))}"
        run = f"{len(record.losses):,} of {record.facts.steps:,} steps"
        steps = f"{run}{', interrupted' * record.interrupted}, {count:,} measured."
    said = report.verdict if is_audited else reason(findings)
    yield f"\n**{markdown(headline(findings, record))}.**" + f" {markdown(said)}" * bool(said)
    yield f"\n{what_happens(record)} {steps}"


def _findings(findings: Sequence[Finding], is_audited: bool) -> Iterator[list[str]]:
    causes = [finding for finding in findings if not follows(finding)]
    if causes:
        yield ["## Findings"]
    for i, finding in enumerate(causes[:_MOST_FINDINGS], 1):
        yield [f"### {i}. {named(finding)}", "", *finding_lines(finding, is_audited)]
    yield _some("More findings", [*map(_line, causes[_MOST_FINDINGS:])], _MOST_OTHERS, level=3)
    consequences = [finding for finding in findings if follows(finding)]
    yield _some("What may follow from these", [*map(_line, consequences)], _MOST_OTHERS)


def named(finding: Finding) -> str:
    """Return title, strength, name and first step of a finding, as Markdown."""
    since = "" if finding.since is None else f", since step {finding.since:,}"
    return f"{finding_title(finding.name)} ({finding.strength}, {code(finding.name)}{since})"


def _line(finding: Finding) -> str:
    where = f": {listed(list(finding.layers), as_code=True)}" if finding.layers else ""
    return f"- {named(finding)}{where}"


def finding_lines(finding: Finding, is_audited: bool) -> list[str]:
    """Return why, what to do (in an audit with its trial), where, and the numbers, as Markdown."""
    said = [markdown(finding.summary), ""] if finding.summary else []
    for advice in finding.advice[:_MOST_FIXES]:
        came = advice.outcome
        tried = f" {came.mark} {markdown(came.words)}" if is_audited else ""
        said.append(f"- Fix: {markdown(advice.text)}{tried}")
    if finding.not_advised:
        said.append(f"- What would not help: {markdown(finding.not_advised)}")
    said.append(f"- Where: {listed(list(finding.layers), as_code=True) or 'the whole model'}")
    if finding.evidence:
        said.append(f"- Evidence: {'; '.join(map(_evidence, finding.evidence[:_MOST_EVIDENCE]))}")
    return said


def _evidence(evidence: Evidence) -> str:
    limit = "" if evidence.limit is None else f" (limit {significant(evidence.limit)})"
    where = "" if evidence.layer is None else f" in {code(evidence.layer or 'the model itself')}"
    step = "" if evidence.step is None else f" at step {evidence.step:,}"
    title = markdown(measure_title(evidence.measure))
    return f"{title} = {significant(evidence.value)}{limit}{where}{step}"


def _measured(record: Record) -> list[str]:
    last, notes = last_with_direction(record.reports), notes_of(record)
    said, lines = "No step was measured.", list[str]()
    if last is not None:
        count = len(last.layers)
        layers = f"{count:,} measured layers" if count != 1 else "one measured layer"
        said = f"{percent(last.coverage)} of the trained parameters lie in the {layers}."
        lines += [f"not measured: {line}" for line in not_measured(last)]
    if record.first_non_finite:
        seen = markdown(record.first_non_finite)
        said += f"\n\nThe first value that is not finite was seen in {seen}."
    lines += notes[:_MOST_NOTES]
    lines += [f"{len(notes) - _MOST_NOTES} more notes"] if len(notes) > _MOST_NOTES else []
    said += "\n" * bool(lines)
    return ["## What was measured", "", said, *(f"- {markdown(line)}" for line in lines)]


def _losses(record: Record) -> list[str]:
    steps, losses = record.steps_of_losses, record.losses
    if not losses:
        return []
    last = len(losses) - 1
    some = sorted({round(i * last / (_MOST_LOSSES - 1)) for i in range(_MOST_LOSSES)})
    rows = [f"| {steps[i]:,} | {significant(losses[i])} |" for i in some]
    return ["## Loss", "", "| step | loss |", "| --- | --- |", *rows]


def _worst(record: Record) -> list[str]:
    last = last_with_direction(record.reports)
    return _listed(f"Worst layers at step {last.step:,}", worst_lines(last)) if last else []


def _listed(title: str, lines: Sequence[str], level: int = 2) -> list[str]:
    return [f"{'#' * level} {title}", "", *lines] if lines else []


def _some(title: str, lines: Sequence[str], most: int, level: int = 2) -> list[str]:
    more = [f"- … {len(lines) - most:,} more"] if len(lines) > most else []
    return _listed(title, [*lines[:most], *more], level)
