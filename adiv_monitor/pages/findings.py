"""The findings as they are printed, and the list of what was looked for."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from adiv_monitor.diagnosis.diagnose import fault_of, finding_title, looked_for, untold
from adiv_monitor.diagnosis.faults import FAMILY_NAMES
from adiv_monitor.diagnosis.finding import STRENGTHS, Finding, Trial
from adiv_monitor.diagnosis.record import Record

STRENGTH_WORDS = {
    "act": "it harms the training: fix it",
    "watch": "it may harm the training",
    "note": "good to know",
}


class Check(NamedTuple):
    """One line of what was looked for: a family of findings in an audit, else a finding.

    Attributes:
        title: name of the family or of the finding, or a question that reports can't answer.
        state: what was found, or why it is not known.
        strength: the strongest of what was found; "" if nothing was.
        is_missing: whether it was not, or not completely, looked for.
        asks: the questions of the family.
    """

    title: str
    state: str
    strength: str = ""
    is_missing: bool = False
    asks: str = ""


def _of_samples(record: Record) -> str:
    """Return the probes of copies of the model without an answer, and the reasons."""
    asked = record.probed.items()
    missing = [
        f"{finding_title(name)} ({probed.untold})" for name, probed in asked if probed.untold
    ]
    return "; ".join(missing) if asked else "tests with copies of the model (none was made)"


# Family → its name, its questions, and what of them an audit could not answer.
_FAMILIES: Mapping[str, tuple[str, str, Callable[[Record], str] | None]] = {
    "could_train": ("The loop", "Are gradients zeroed, kept and applied? Is the rate zero?", None),
    "parameters": ("Parameters", "Are all held, reached and changed as their gradient says?", None),
    "samples": (
        "Between the layers",
        "Are samples and axes kept apart, and gradients, inputs and activations used?",
        _of_samples,
    ),
    "targets": ("Targets", "Do outputs and targets fit each other and the loss?", None),
    "loss": (
        "Loss",
        "Does it teach all labels? Is its slope zero? Do its terms oppose each other?",
        lambda r: "the loss of a constant prediction (not known)" * (r.chance is None),
    ),
    "data": ("Data", "Do they differ? Are they shuffled? Do labels belong to inputs?", None),
    "inputs": (
        "Inputs and values",
        "Are all finite? Are inputs of a suitable scale and centred, rows of similar length?",
        lambda r: "inputs (no floating-point input was seen)" * (not r.inputs),
    ),
    "initialisation": (
        "Initialisation and depth",
        "Do gradients vanish or explode? Do outputs depend on inputs?",
        lambda r: "whether inputs matter (not known)" * math.isnan(r.wiring.input_matters),
    ),
    "optimizer": ("Optimizer", "Do momentum, decay or projections turn the step?", None),
    "rates": (
        "Learning rate",
        "Is it too high? Do layers learn at similar speeds?",
        lambda r: "other learning rates (not tried)" * (not r.rates),
    ),
    "units": (
        "Activation functions",
        "Are units dead or saturated, over many batches?",
        lambda r: "units (no activation function was seen)" * (not r.units),
    ),
    "states": (
        "Course of the loss",
        "Does it fall? Can the model overfit one batch? Do rows disturb each other's step?",
        lambda r: "overfitting one small batch (not tried)" * (r.overfit is None),
    ),
}


def checks(findings: Sequence[Finding], record: Record) -> tuple[Check, ...]:
    """Return what was looked for in a run, what was found of it, and what is not known."""
    return tuple((_of_audit if record.is_audited else _of_reports)(findings, record))


def _of_audit(findings: Sequence[Finding], record: Record) -> Iterator[Check]:
    for family in (*FAMILY_NAMES, ""):
        found = [finding for finding in findings if fault_of(finding).family == family]
        title, asks, missing = _FAMILIES.get(family, ("Others", "All other findings.", None))
        lacks = missing(record) if missing else ""
        titles = ", ".join(dict.fromkeys(finding_title(finding.name) for finding in found))
        state = (titles or "nothing found") + f"; not checked: {lacks}" * bool(lacks)
        strength = min((f.strength for f in found), key=STRENGTHS.index, default="")
        if family or found:
            yield Check(title, state, strength, bool(lacks), asks)


def _of_reports(findings: Sequence[Finding], record: Record) -> Iterator[Check]:
    strengths = {finding.name: finding.strength for finding in reversed(findings)}
    for name in looked_for(record, findings):
        state = "found" if name in strengths else "looked at, nothing found"
        yield Check(finding_title(name), state, strengths.get(name, ""))
    for title, do in untold(record).items():
        yield Check(title, f"reports can't tell; to find out, {do}", is_missing=True)


def all_trials(findings: Sequence[Finding], record: Record) -> list[Trial]:
    """Return every trial on the run's own batches, each fix once; those with most gain first."""
    tried = [a.trial for finding in findings for a in finding.advice if a.trial is not None]
    by_fix = {trial.fix: trial for trial in (*record.rates.values(), *tried)}
    return sorted(by_fix.values(), key=lambda trial: -trial.gain)


def significant(value: float) -> str:
    """Format a value with three significant digits; a whole number in full."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    is_whole = value == round(value) and abs(value) < 1e6
    return f"{value:,.0f}" if is_whole or 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
