"""The page of an audit, or of a training that is known from its reports."""

import math
from collections import Counter
from collections.abc import Sequence

from adiv_monitor.diagnosis.course import difference
from adiv_monitor.diagnosis.diagnose import follows, reason, running_headline, what_happens
from adiv_monitor.diagnosis.diagnosis import Diagnosis
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pages.findings import all_trials, checks
from adiv_monitor.pages.heat import heat_map, heat_measures
from adiv_monitor.pages.layers import layer_table, worst
from adiv_monitor.pages.pictures import loss_picture
from adiv_monitor.pages.render import render
from adiv_monitor.report import ALIGNMENT_MEASURES, ATTENTION_MEASURES, StepReport, taken
from adiv_monitor.report.plain import without_secrets
from adiv_monitor.report.wording import not_measured


def page(report: Diagnosis, count: int | None = None, alarms: Sequence[object] = ()) -> str:
    """Return a report as a self-contained HTML page, which makes no network requests.

    Args:
        report: diagnosis of an audit, or of a training that is known from its reports.
        count: number of measured steps, if the record may hold fewer reports.
        alarms: alarms that rules of the user's have raised.

    Returns:
        The text of the file, to be written as UTF-8.

    Raises:
        ImportError: the package jinja2 or matplotlib is missing.
    """
    record, findings = report.record, report.findings
    last = last_with_direction(record.reports)
    return render(
        "report.html",
        title=titled(record),
        report=report,
        record=record,
        facts=record.facts,
        headline=headline(findings, record),
        lead=report.verdict if record.is_audited else reason(findings),
        what_happens=what_happens(record),
        strengths=Counter(finding.strength for finding in findings),
        causes=[finding for finding in findings if not follows(finding)],
        consequences=[finding for finding in findings if follows(finding)],
        checks=checks(findings, record),
        count=len(record.reports) if count is None else count,
        alarms=[str(alarm) for alarm in alarms],
        last=last,
        not_measured=not_measured(last) if last else [],
        notes=notes_of(record),
        worst=[*worst(last)] if last else [],
        loss_picture=loss_picture(record) if record.losses else None,
        trials=all_trials(findings, record),
        heat=heat_map(record, heat_measures(record, findings)),
        layers=layer_table(last) if last else None,
        anchors={path: i for i, path in enumerate(last.layers)} if last else {},
        attention=taken(last, ATTENTION_MEASURES) if last else (),
        alignment=taken(last, ALIGNMENT_MEASURES) if last else (),
        settings=settings(record),
    )


def titled(record: Record) -> str:
    """Return what the report is about: an audit, or a training up to a step."""
    if record.is_audited:
        return f"Audit of {record.facts.model}"
    return "Training" + "".join(f" up to step {r.step:,}" for r in record.reports[-1:])


def headline(findings: Sequence[Finding], record: Record) -> str:
    """Return the number of findings to fix or to watch; of a training, the strongest ones.

    If the copy does not train as the user's run did, the headline says so, since findings in the
    copy, or their absence, may not apply to the run.
    """
    if not record.is_audited:
        return running_headline(findings, record)
    differs = "the copy does not train as your run did" if difference(record) else ""
    acts, watches = (sum(f.strength == which for f in findings) for which in ("act", "watch"))
    if acts:
        said = f"{_things(acts)} to fix" + f", and {differs}" * bool(differs)
    else:
        said = differs or "nothing to fix" + f", {_things(watches)} to watch" * bool(watches)
    return said[0].upper() + said[1:]


def _things(count: int) -> str:
    return "one thing" if count == 1 else f"{count} things"


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
    rates = sorted(record.reports[0].learning_rates if record.reports else ())
    said = [f"{rate:.3g}" for rate in dict.fromkeys((*rates[:1], *rates[-1:]))]
    said = said or [_plain(facts.settings.get("lr") or "not known")]  # may be of any type
    return " · ".join((
        f"{model}, {facts.trained}" if facts.trained else model,
        data,
        f"loss {facts.loss}" if facts.loss else "the model's own loss",
        f"{facts.optimizer}, learning rate{'s' * (len(said) > 1)} {' to '.join(said)}",
    ))  # fmt: skip


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def last_with_direction(reports: Sequence[StepReport]) -> StepReport | None:
    """Return the last report in which a layer has a direction, else the last one."""
    for report in reversed(reports):
        values = (reading.update_cosine for reading in report.layers.values())
        if any(value is not None and math.isfinite(value) for value in values):
            return report
    return reports[-1] if reports else None


def notes_of(record: Record) -> list[str]:
    """Return the notes of the record and of its reports, each once."""
    notes = [*record.notes, *(note for report in record.reports for note in report.notes)]
    return list(dict.fromkeys(notes))
