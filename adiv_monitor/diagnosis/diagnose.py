"""All findings of a run, and the verdict on a training from its reports, in one line of thought.

Could it train? What does the loss do? Which is the first cause that explains it? What follows from
that? `found` asks the rules in this order; what follows from a cause gives no advice of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from adiv_monitor.diagnosis.course import FEWEST, course, end, may_have_fallen
from adiv_monitor.diagnosis.faults import FAULTS, Fault, could_show, found
from adiv_monitor.diagnosis.faults.fault import LONG_STEPS
from adiv_monitor.diagnosis.faults.states import OF_MOVES, TARGETS
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Finding, unrefuted
from adiv_monitor.diagnosis.health import sentence
from adiv_monitor.diagnosis.readings import FEWEST_REPORTS, maps, several
from adiv_monitor.diagnosis.record import Record

FIRST_THAT = (Advice("fix the findings above first", untried="its cause comes first"),)
NOTHING = "Nothing found in what was measured"
NOT_MEASURED = "Can't tell: no layer was measured"
TOO_FEW = f"Can't tell yet: measure at least {FEWEST_REPORTS} steps (`every_n_steps=…`)"
_BEFORE = {"act": "To fix", "watch": "To watch", "note": "Nothing to fix; good to know"}
NO_CAUSE = "Does not train; cause not found: "
# What healthy runs have, too: behind exact causes of the same strength, and before symptoms.
TRAITS = ("frozen", "input-mean", "input-scale", "row-spread", "dead-units", "saturated-units")
# Of the loss: what a lower learning rate must take away to come before a fault in structure. One
# that is too low shows in layers that hardly move, too.
MUCH = 0.3
LOSS_UNKNOWN = "not known: give `Monitor(loss=…)` the module that your loop calls, or `log_loss`"


def fault_of(finding: Finding) -> Fault:
    """Return the fault of a finding; one that explains nothing if it is not registered."""
    return FAULTS.get(finding.name, Fault(sentence(finding.name), ""))


def _of_reports(findings: Sequence[Finding], record: Record) -> Iterator[Finding]:
    """Yield the findings of a monitor's run: the first cause that explains others, and these.

    If the loop does not train the model as it should, all else but the inputs may follow from that.
    If the loss rises, a learning rate that is too high is asked about before the inputs.
    """
    if course(record) == "rises":
        findings = sorted(findings, key=lambda finding: fault_of(finding).about == "inputs")
    causes = [finding for finding in findings if finding.strength != "note"]
    abouts = {fault_of(finding).about for finding in causes}
    of_loop, others = "loop" in abouts, bool(abouts - {"symptom"})
    explained = next((e for c in causes if {*LONG_STEPS} <= {*(e := fault_of(c).explains)}), ())
    for finding in findings:
        about = fault_of(finding).about
        behind = of_loop and about not in ("loop", "inputs")
        behind |= finding.name in explained or (about == "symptom" and others)
        if not (of_loop and finding.name == "rate-too-low"):
            yield _behind(finding) if behind else finding


def _behind(finding: Finding) -> Finding:
    strength = "watch" if finding.strength == "act" else finding.strength
    return replace(finding, strength=strength, advice=FIRST_THAT, not_advised="")


def explained(findings: Sequence[Finding], record: Record) -> list[Finding]:
    """Put the findings that the first cause explains behind it: these give no other advice.

    Those that come last defer to every other finding to act on, and to all that explain them.
    """
    cause = _first_cause(findings, record)
    names = {*fault_of(cause).explains} - {cause.name} if cause else set()
    is_last = any(f.strength == "act" and f.name != "cannot-overfit" for f in findings)
    is_last |= any(f.strength == "watch" and "cannot-overfit" in fault_of(f).explains
                   for f in findings)  # fmt: skip
    said = [_behind(f) if f is not cause
            and (f.name in names or (is_last and fault_of(f).about == "last")) else f
            for f in findings]  # fmt: skip
    return [replace(f, strength="act") if f is cause else f for f in said]


def _first_cause(findings: Sequence[Finding], record: Record) -> Finding | None:
    """Return the first cause to act on that no other one explains; None: there is none.

    In an audit, a finding to watch that explains the first one to act on is its cause, unless its
    own fixes can be tried, another learning rate takes much of the loss away, or what it explains
    comes last anyway.
    """
    act = [finding for finding in findings if finding.strength == "act"]
    causes = [finding for finding in act if is_cause(finding)]
    names = {name for f in causes for name in fault_of(f).explains if name != f.name}
    causes.sort(key=lambda finding: finding.name in names)
    first = next(iter([*causes, *act]), None)
    if first is None or not record.is_audited or fault_of(first).about == "last":
        return first if causes else None
    least = MUCH * (first.name == "rate-too-high")
    by_rate = first.name.startswith("rate-") and any(
        trial.helps and not trial.gain < least * abs(trial.loss_without)
        for trial in record.rates.values()
    )
    watched = [f for f in findings if f.strength == "watch" and not (by_rate or follows(f))
               and first.name in fault_of(f).explains
               and not any(advice.fix for advice in f.advice)]  # fmt: skip
    return next(iter([*watched, *causes]), None)


def follows(finding: Finding) -> bool:
    """Return whether a finding may follow from another one, and so gives no advice of its own."""
    return finding.advice == FIRST_THAT


def is_cause(finding: Finding) -> bool:
    """Return whether a finding explains that others are there.

    What follows from steps that are too long, the trials of learning rates tell.
    """
    return bool(fault_of(finding).explains) and finding.name != "rate-too-high"


def diagnose(record: Record) -> tuple[Finding, ...]:
    """Return all findings, strongest first, and of equal strength causes before symptoms.

    In an audit, traits that healthy runs have, too, stand between the two.

    If a learning rate was tried and pays, statements of rules that it would not help are removed.
    """
    findings = found(record)
    if not record.is_audited:
        findings = [*_of_reports(findings, record)]
    findings = explained(findings, record)
    if record.trained:  # what was learnt would be lost
        kept = [tuple(a for a in f.advice if a.fix != "reinitialise") for f in findings]
        findings = [replace(f, advice=a) for f, a in zip(findings, kept, strict=True)]
    said = [unrefuted(finding, record.rates.values()) for finding in findings]
    if record.is_audited:
        said.sort(key=_rank)
    return tuple(sorted(said, key=lambda finding: STRENGTHS.index(finding.strength)))


def _rank(finding: Finding) -> int:
    is_symptom = fault_of(finding).about in ("symptom", "last")
    return 2 * is_symptom + (finding.name in TRAITS) if finding.strength == "watch" else 0


def finding_title(name: str) -> str:
    """Return the title of a finding."""
    return FAULTS[name].title if name in FAULTS else sentence(name)


def running_headline(findings: Sequence[Finding], record: Record) -> str:
    """Return the strongest findings in a few words."""
    if not findings:
        nothing = NOTHING if several(record) else TOO_FEW
        return nothing if any(report.layers for report in record.reports) else NOT_MEASURED
    strongest, said = findings[0].strength, findings[0].summary
    if findings[0].name == "loss-stuck":
        do = f"; {TARGETS.text}" * (strongest != "note" and TARGETS in findings[0].advice)
        begin = "Good to know: " if strongest == "note" else NO_CAUSE
        return f"{begin}{said[:1].lower()}{said[1:].rstrip('.')}{do}"
    first, *others = dict.fromkeys(fault_of(f).title for f in findings if f.strength == strongest)
    more = f" and {len(others)} more" * bool(others)
    return f"{_BEFORE[strongest]}: {first[:1].lower()}{first[1:]}{more}"


def reason(findings: Sequence[Finding]) -> str:
    """Return what the strongest finding says, unless the headline does; "" without findings."""
    return findings[0].summary if findings and findings[0].name != "loss-stuck" else ""


def looked_for(record: Record, found: Sequence[Finding] = ()) -> tuple[str, ...]:
    """Return the names of findings that these reports could show; those that they show come first.

    If a finding is about how far layers move, that they hardly do is left out.
    """
    names = {finding.name: None for finding in found}
    left = {"stands-still"} if names.keys() & {*OF_MOVES} else set()
    return tuple(dict.fromkeys([*names, *(n for n in could_show(record) if n not in left)]))


def untold(record: Record) -> dict[str, str]:
    """Return the questions that these reports can't answer, with what would answer them."""
    is_short = len(record.losses) < FEWEST and not record.first_non_finite
    not_from_the_start = maps(record) and not FAULTS["vanishing"].shown_by(record)
    asked = (
        (is_short, "Whether the loss falls", "pass the loss of every step to the monitor "
         "(`Monitor(…, loss=…)` or `monitor.log_loss(…)`), for at least "
         f"{FEWEST} steps"),
        (not several(record), "How far layers typically move",
         f"measure at least {FEWEST_REPORTS} steps (a smaller `every_n_steps`)"),
        (not_from_the_start, "Whether gradients vanish or explode from the start",
         "measure step 0 of a network with at least three layers"),
        (not FAULTS["interference"].shown_by(record), "Direction lost to interference",
         "measure with `Monitor(…, attainable=True)`"),
        (True, "Wiring, inputs, labels, units, loss, decay, clipping, other learning rates",
         "run `adiv-audit`"),
    )  # fmt: skip
    return {title: do for is_open, title, do in asked if is_open}


def what_happens(record: Record) -> str:
    """Return what the loss does, with its first value and the mean of its last quarter."""
    if not record.losses:
        return f"Loss: {LOSS_UNKNOWN}."
    said: str = course(record)
    if not math.isfinite(record.losses[-1]):
        said = "not finite"
    elif said == "unknown" or may_have_fallen(record):
        said = "not clear whether it falls"
    ends = f"{record.losses[0]:.3g} at first, {end(record):.3g} over the last quarter"
    return f"Loss: {said}, {ends}."
