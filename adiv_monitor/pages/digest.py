"""A report as short Markdown to paste: the text of the page, without its pictures."""

from collections.abc import Iterable, Iterator, Sequence

from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.titles import finding_title, measure_title
from adiv_monitor.diagnosis.verdict import looked_for, loss_words, running_headline, untold
from adiv_monitor.pages.findings import checks, significant
from adiv_monitor.pages.layers import worst
from adiv_monitor.pages.report_page import (
    headline,
    introduced,
    last_with_direction,
    notes_of,
    settings,
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
    parts = [
        [MARK, *_head(report, len(record.reports) if count is None else count)],
        _some("Alarms", [f"- {markdown(str(alarm))}" for alarm in alarms], _MOST_ALARMS),
        *_findings(findings, record.is_audited),
        ["## What was looked for", "", *_looked_for(findings, record)],
        _measured(record),
        _listed("Settings", _settings(record)),
        _losses(record),
        _worst(record),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(report: Diagnosis, count: int) -> Iterator[str]:
    record = report.record
    reports = record.reports
    if record.is_audited:
        yield f"# Audit of {code(record.facts.model)}"
        yield f"\n{markdown(introduced(record))}"
        yield f"\n**{headline(report.findings, record)}.** {markdown(report.verdict)}"
        run = f"{len(record.losses):,} of {record.facts.steps:,} steps"
        interrupted = ", interrupted" * record.interrupted
        yield f"\n{run}{interrupted}, {count:,} measured."
        return
    last = f" up to step {reports[-1].step:,}" if reports else ""
    yield f"# Training{last}"
    yield f"\n**{markdown(running_headline(report.findings, record))}.**"
    yield f"\n{count:,} step{'' if count == 1 else 's'} measured. Loss: {loss_words(record)}."


def _findings(findings: Sequence[Finding], is_audited: bool) -> Iterator[list[str]]:
    if not findings:
        return
    yield ["## Findings"]
    for i, finding in enumerate(findings[:_MOST_FINDINGS], 1):
        since = "" if finding.since is None else f", since step {finding.since:,}"
        title = f"### {i}. {finding_title(finding.name)}"
        said = [f"{title} ({finding.strength}, {code(finding.name)}{since})", ""]
        said += [markdown(finding.summary), ""] if finding.summary else []
        where = listed(list(finding.layers), as_code=True) or "the whole model"
        said.append(f"- Where: {where}")
        if finding.evidence:
            read = map(_evidence, finding.evidence[:_MOST_EVIDENCE])
            said.append(f"- Evidence: {'; '.join(read)}")
        for advice in finding.advice[:_MOST_FIXES]:
            came = advice.outcome
            tried = f" {came.mark} {markdown(came.words)}" if is_audited else ""
            said.append(f"- Fix: {markdown(advice.text)}" + tried)
        if finding.not_advised:
            said.append(f"- What would not help: {markdown(finding.not_advised)}")
        yield said
    others = [
        f"- {finding_title(f.name)} ({f.strength}, {code(f.name)})"
        + (f": {listed(list(f.layers), as_code=True)}" if f.layers else "")
        for f in findings[_MOST_FINDINGS:]
    ]
    yield _some("More findings", others, _MOST_OTHERS, level=3)


def _evidence(evidence: Evidence) -> str:
    limit = "" if evidence.limit is None else f" (limit {significant(evidence.limit)})"
    where = "" if evidence.layer is None else f" in {code(evidence.layer or 'the model itself')}"
    step = "" if evidence.step is None else f" at step {evidence.step:,}"
    title = markdown(measure_title(evidence.measure))
    return f"{title} = {significant(evidence.value)}{limit}{where}{step}"


def _looked_for(findings: Sequence[Finding], record: Record) -> Iterator[str]:
    """Yield one line per question: found, nothing found, or can't be answered from this record."""
    if record.is_audited:
        for check in checks(findings, record):
            found = ", ".join(check.findings)
            state = f"found: {found}" if found else "nothing found"
            missing = f"; not checked: {check.missing}" if check.missing else ""
            yield f"- {check.title}: {markdown(state + missing)}"
        return
    found_names = {finding.name for finding in findings}
    for name in looked_for(record, findings):
        state = "found" if name in found_names else "looked at, nothing found"
        yield f"- {finding_title(name)}: {state}"
    for line in untold(record):
        how = markdown(line.would_tell)
        yield f"- {markdown(line.title)}: reports can't tell; to find out, {how}"


def _measured(record: Record) -> list[str]:
    said = ["## What was measured", ""]
    last = last_with_direction(record.reports)
    if last is None:
        said.append("No step was measured.")
    else:
        layers = f"{len(last.layers):,} measured layers"
        said.append(f"{percent(last.coverage)} of the trained parameters lie in the {layers}.")
    if record.first_non_finite:
        seen = markdown(record.first_non_finite)
        said.append(f"\nThe first value that is not finite was seen in {seen}.")
    lines = [] if last is None else [f"not measured: {line}" for line in not_measured(last)]
    notes = notes_of(record)
    lines += notes[:_MOST_NOTES]
    lines += [f"{len(notes) - _MOST_NOTES} more notes"] if len(notes) > _MOST_NOTES else []
    return [*said, *([""] if lines else []), *(f"- {markdown(line)}" for line in lines)]


def _settings(record: Record) -> list[str]:
    known = settings(record) if record.is_audited else {}
    return [f"- {name}: {markdown(value)}" for name, value in known.items()]


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
    lines = [
        f"- {end.title}: {end.text} in "
        + "one of " * (len(end.layers) > 1)
        + listed(list(end.layers), as_code=True)
        for end in (worst(last) if last is not None else ())
    ]
    return _listed(f"Worst layers at step {last.step:,}" if last is not None else "", lines)


def _listed(title: str, lines: Sequence[str], level: int = 2) -> list[str]:
    return [f"{'#' * level} {title}", "", *lines] if lines else []


def _some(title: str, lines: Sequence[str], most: int, level: int = 2) -> list[str]:
    more = [f"- … {len(lines) - most:,} more"] if len(lines) > most else []
    return _listed(title, [*lines[:most], *more], level)
