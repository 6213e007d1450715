"""All findings of a run, in one line of thought.

Could it train? What does the loss do? Which is the first cause that explains it? What follows from
that? `found` asks the rules in this order; what follows from a cause gives no advice of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adiv_monitor.diagnosis.course import course
from adiv_monitor.diagnosis.faults import FAULTS, Fault, found
from adiv_monitor.diagnosis.faults.fault import LONG_STEPS
from adiv_monitor.diagnosis.finding import STRENGTHS, Advice, Finding, unrefuted
from adiv_monitor.diagnosis.record import Record

FIRST_THAT = (Advice("fix the findings above first", untried="its cause comes first"),)


def fault_of(finding: Finding) -> Fault:
    """Return the fault of a finding; one that explains nothing if it is not registered."""
    return FAULTS.get(finding.name, Fault(finding.name, ""))


def _of_reports(findings: Sequence[Finding], record: Record) -> Iterator[Finding]:
    """Yield the findings of a monitor's run: the first cause that explains others, and these.

    If the loop does not train the model as it should, all else but the inputs may follow from that.
    If the loss rises, a learning rate that is too high is asked about before the inputs.
    """
    if course(record) == "rises":
        findings = sorted(findings, key=lambda finding: fault_of(finding).about == "inputs")
    causes = [finding for finding in findings if finding.strength != "note"]
    of_loop = any(fault_of(finding).about == "loop" for finding in causes)
    others = any(fault_of(finding).about != "symptom" for finding in causes)
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


def explained(findings: Sequence[Finding]) -> list[Finding]:
    """Put the findings that the first cause explains behind it: these give no other advice.

    Those that come last defer to every other finding to act on, and to all that explain them.
    """
    act = [finding for finding in findings if finding.strength == "act"]
    cause = next((finding for finding in act if is_cause(finding)), None)
    if cause is None:
        is_last = any(finding.name != "cannot-overfit" for finding in act)
        is_last |= any("cannot-overfit" in fault_of(f).explains for f in findings
                       if f.strength == "watch")  # fmt: skip
        return [_behind(f) if fault_of(f).about == "last" and is_last else f for f in findings]
    names = fault_of(cause).explains
    return [_behind(f) if f.name in names and f is not cause else f for f in findings]


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

    If a learning rate was tried and pays, statements of rules that it would not help are removed.
    """
    findings = found(record)
    if not record.is_audited:
        findings = [*_of_reports(findings, record)]
    findings = explained(findings)
    if record.trained:  # what was learnt would be lost
        kept = [tuple(a for a in f.advice if a.fix != "reinitialise") for f in findings]
        findings = [replace(f, advice=a) for f, a in zip(findings, kept, strict=True)]
    said = [unrefuted(finding, record.rates.values()) for finding in findings]
    return tuple(sorted(said, key=lambda finding: STRENGTHS.index(finding.strength)))
