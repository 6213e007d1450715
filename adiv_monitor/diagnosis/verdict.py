"""The verdict on a training from its reports: found, not found, or unknown."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from adiv_monitor.diagnosis.course import FEWEST, course, end, may_have_fallen
from adiv_monitor.diagnosis.diagnose import fault_of
from adiv_monitor.diagnosis.faults import FAULTS, could_show
from adiv_monitor.diagnosis.faults.fault import FEWEST_REPORTS, several
from adiv_monitor.diagnosis.faults.states import OF_MOVES, SPEAK_OF
from adiv_monitor.diagnosis.finding import STRENGTHS, Finding
from adiv_monitor.diagnosis.readings import maps
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.titles import finding_title

NOTHING = "Nothing found in what was measured"
NOT_MEASURED = "Can't tell: no layer was measured"
_BEFORE = {"act": "To fix", "watch": "To watch", "note": "Nothing to fix; good to know"}
NO_CAUSE = "Does not train; cause not found: "
LOSS_UNKNOWN = "not known: pass it to the monitor (`Monitor(loss=…)` or `monitor.log_loss(…)`)"


class Untold(NamedTuple):
    """A question that reports can't answer.

    Attributes:
        title: the question.
        would_tell: an action that would answer it.
    """

    title: str
    would_tell: str


_ONLY_AUDITS = (
    Untold("Whether another learning rate does better", "run `adiv-audit`"),
    Untold("Wiring, inputs, labels, single units, the loss function, decay, clipping",
           "run `adiv-audit`"),
)  # fmt: skip


def running_headline(findings: Sequence[Finding], record: Record) -> str:
    """Return the strongest findings in a few words.

    It states that nothing was found only if no layer is drawn far outside the healthy range, unless
    a finding explains why.
    """
    found = [finding for finding in findings if fault_of(finding).about != "course"]
    if found:
        strongest = min((f.strength for f in found), key=STRENGTHS.index)
        titles = dict.fromkeys(finding_title(f.name) for f in found if f.strength == strongest)
        first, *others = titles
        if found[0].name == "loss-stuck" and strongest != "note":
            return NO_CAUSE + found[0].summary[:1].lower() + found[0].summary[1:].rstrip(".")
        more = f" and {len(others)} more" if others else ""
        return f"{_BEFORE[strongest]}: {first[:1].lower()}{first[1:]}{more}"
    return NOTHING if any(report.layers for report in record.reports) else NOT_MEASURED


def looked_for(record: Record, found: Sequence[Finding] = ()) -> tuple[str, ...]:
    """Return the names of findings that these reports could show; those that they show come first.

    If a finding is about how far layers move, the other ones about it are left out. So are findings
    about a measure that is outside of the healthy range, but within their own limits.
    """
    names = {finding.name: None for finding in found}
    left = {"stands-still", "outside-healthy"} if names.keys() & OF_MOVES else set()
    outside = (finding for finding in found if finding.name == "outside-healthy")
    measures = {evidence.measure for finding in outside for evidence in finding.evidence}
    left = left.union(*(SPEAK_OF[measure] for measure in measures))
    return tuple(dict.fromkeys([*names, *(n for n in could_show(record) if n not in left)]))


def untold(record: Record) -> tuple[Untold, ...]:
    """Return the questions that these reports can't answer, and how to answer them."""
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
    )  # fmt: skip
    return (*(Untold(title, do) for is_open, title, do in asked if is_open), *_ONLY_AUDITS)


def until(record: Record) -> str:
    """Return words for the finite part of the run, if a step is not finite; "" if all are."""
    if record.non_finite_since is None:
        return ""
    steps = [r.step for r in record.reports if r.step < record.non_finite_since]
    return f" up to step {steps[-1]:,}" if steps else " in the finite values"


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
