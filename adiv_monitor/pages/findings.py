"""The findings as they are printed, and the list of checks that were made."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adiv_monitor.diagnosis.finding import STRENGTHS, Evidence, Finding, Trial
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.titles import finding_title, measure_title

STRENGTH_WORDS = {
    "act": "it harms the training: fix it",
    "watch": "it may harm the training",
    "note": "good to know",
}


@dataclass(frozen=True)
class Check:
    """One group of checks.

    Attributes:
        title: name of the group.
        asks: the question in words.
        findings: titles of the findings.
        strength: the strongest of them; "" if there is none.
        missing: why the group was not, or not completely, checked; "" if it was.
    """

    title: str
    asks: str
    findings: tuple[str, ...]
    strength: str
    missing: str = ""


def _always(record: Record) -> str:
    return ""


def _of_rates(record: Record) -> str:
    return "" if record.rates else "other learning rates (not tried)"


def _of_loss(record: Record) -> str:
    return "" if record.chance is not None else "the loss of a constant prediction (not known)"


def _of_inputs(record: Record) -> str:
    return "" if record.inputs else "inputs (no floating-point input was seen)"


def _of_units(record: Record) -> str:
    return "" if record.units else "units (no activation function was seen)"


def _of_wiring(record: Record) -> str:
    missing = []
    if math.isnan(record.wiring.input_matters):
        missing.append("whether inputs matter (not known)")
    if record.overfit is None:
        missing.append("overfitting one small batch (not tried)")
    return "; ".join(missing)


def _of_probes(record: Record) -> str:
    """Return the probes of copies of the model without an answer, and the reasons."""
    asked = record.probed.items()
    missing = [
        f"{finding_title(name)} ({probed.untold})" for name, probed in asked if probed.untold
    ]
    return "; ".join(missing) if asked else "tests with copies of the model (none was made)"


# Title, question, findings that answer it, and a function that returns what is missing; causes
# come before symptoms.
_CHECKS: tuple[tuple[str, str, tuple[str, ...], Callable[[Record], str]], ...] = (
    (
        "Wiring",
        "Are all parameters reached and held? Do inputs matter? Can the model overfit one batch, "
        "and learn as much as a small network?",
        (
            *("not-held", "unreached", "frozen", "input-ignored", "cannot-overfit"),
            "behind-reference",
        ),
        _of_wiring,
    ),
    ("Finite values", "Are losses, activations and gradients finite?", ("non-finite",), _always),
    (
        "Inputs",
        "Are they of a suitable scale, centred and shuffled? Are rows of similar length? Do labels "
        "belong to their inputs?",
        (
            *("input-scale", "input-mean", "row-spread", "constant-data", "same-batch"),
            *("unshuffled", "target-leak", "targets-moved", "labels-unrelated"),
            "batch-part-unread",
        ),
        _of_inputs,
    ),
    (
        "Learning rate",
        "Is it too high or too low? Does the loss fall? Do layers learn at similar speeds?",
        ("rate-too-high", "rate-too-low", "uneven-rates", "loss-stuck"),
        _of_rates,
    ),
    (
        "Loss",
        "Does it receive the outputs and targets that it expects? Is its size suitable?",
        (
            *("double-softmax", "activated-logits", "target-scale", "unbounded-loss"),
            *("broadcast-loss", "no-log", "softmax-of-one", "softmax-over-samples"),
            *("targets-out-of-range", "target-is-input", "future-leak", "bounded-logits"),
            *("dropout-on-outputs", "outputs-normalised", "zero-slope", "zero-gradient"),
            *("logits-as-probabilities", "loss-reversed", "targets-misplaced", "pairs-reversed"),
            *("label-smoothing", "class-weights", "class-untaught", "padding-counts"),
            *("penalty-dominates", "collapsed"),
            *("penalty-dominates", "collapsed"),
            *("term-without-graph", "terms-opposed"),
        ),
        _of_loss,
    ),
    (
        "Initialisation and depth",
        "Do gradients vanish or explode on their way through the layers?",
        ("bad-initialisation", "one-sided-weights", "vanishing", "exploding"),
        _always,
    ),
    (
        "Activation functions",
        "Are units dead or saturated, over many batches?",
        ("dead-units", "saturated-units"),
        _of_units,
    ),
    ("Interference", "Do rows disturb each other's step?", ("interference",), _always),
    (
        "Optimizer",
        "Do momentum, decay, clipping, projections or ε turn the step, undo it or shorten it?",
        (
            *("optimizer-turns", "decay-fights", "projection-fights", "clipping-always"),
            "epsilon-dominates",
        ),
        _always,
    ),
    (
        "Code",
        "Are all parameters registered, modules in the right mode, gradients and axes intact?",
        (
            *("hidden-parameters", "rate-zero", "rounded-away", "gradient-hooks"),
            *("left-in-eval", "batch-norm-starved", "dropout-too-high", "dropout-in-eval"),
            "running-statistics",
            *("samples-mixed", "reshape-scrambles", "gradient-cut", "no-activation"),
            *("gradient-differs", "state-carried"),
            *(
                "unsafe-division",
                "input-partly-ignored",
                "order-ignored",
            ),
            *("attention-axis", "attention-saturated"),
            "outputs-constant",
        ),
        _of_probes,
    ),
)


def checks(findings: Sequence[Finding], record: Record) -> tuple[Check, ...]:
    """Return all groups of checks, with their findings."""
    known = {name for _, _, names, _ in _CHECKS for name in names}
    made = [
        _check(title, asks, [f for f in findings if f.name in names], missing(record))
        for title, asks, names, missing in _CHECKS
    ]
    if others := [f for f in findings if f.name not in known]:
        made.append(_check("Others", "All other findings.", others, ""))
    return tuple(made)


def _check(title: str, asks: str, found: Sequence[Finding], missing: str) -> Check:
    titles = tuple(dict.fromkeys(finding_title(finding.name) for finding in found))
    strength = min((f.strength for f in found), key=STRENGTHS.index, default="")
    return Check(title, asks, titles, strength, missing)


def evidence_rows(evidence: Sequence[Evidence]) -> list[dict[str, object]]:
    """Return the evidence in printable form."""
    return [
        {
            "measure": measure_title(e.measure),
            "name": e.measure,
            "value": significant(e.value),
            "limit": None if e.limit is None else significant(e.limit),
            "layer": e.layer,
            "step": e.step,
        }
        for e in evidence
    ]


def all_trials(findings: Sequence[Finding], record: Record) -> list[Trial]:
    """Return every trial on the run's own batches, each fix once; those with most gain first."""
    tried = [a.trial for finding in findings for a in finding.advice if a.trial is not None]
    by_fix = {trial.fix: trial for trial in (*record.rates.values(), *tried)}
    return sorted(by_fix.values(), key=lambda trial: -trial.gain)


def significant(value: float) -> str:
    """Format a value with three significant digits; a whole number in full."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == round(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
