"""What do the optimizer, and code after it, make of the gradient?

Does weight decay outweigh it, does other code undo the step, does the step go another way?
"""

import math
from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.diagnosis.course import is_long_enough
from adiv_monitor.diagnosis.faults.fault import fault, stepped
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.remedies import USUAL, less_momentum
from adiv_monitor.diagnosis.finding import HIGHER_RATES, LOWER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import Typical, at_first, by_layer, named, worst_first
from adiv_monitor.diagnosis.record import Record

# Share of the last direction that each step keeps; this one lasts for 40 steps, 0.9 for 10.
LONG_MOMENTUM = 0.975
# Duration of momentum relative to the run; beyond it, later gradients hardly count.
LONGER_THAN_THE_RUN = 10.0
# parameter_cosine late in the run; healthy runs with momentum or Adam have 0.25 to 0.5.
STALE = 0.2
# Pull of the weight decay over the gradient's.
DECAY_WATCH, DECAY_ACT = 0.3, 1.0
# ‖parameters‖ at the end over ‖parameters‖ at the beginning.
SHRUNK = 0.5  # healthy ratios are 1.1 to 2.9
# cos(step as applied, optimizer's step). It is 1 if nothing changes weights after the step.
PROJECTED = 0.98
# cos(first step, −gradient): the first step has no past, and healthy runs have 0.47 and above.
FIRST_STEP = 0.2


@fault("decay-fights", "Weight decay outweighs the gradient")
def decay_fights(record: Record) -> Iterator[Finding]:
    """Find weight decay, the optimizer's or in the loss, that pulls harder than the gradient."""
    norms = [norm for norm in record.parameter_norms if math.isfinite(norm)]
    if not norms or norms[0] == 0:
        return
    decay = _decay(record)
    pull = first_pull(record, decay)
    shrunk = norms[-1] / norms[0]
    kept = by_layer(record, "projection_cosine").values()
    by_others = decay == 0 and any(cosine.below(PROJECTED) for cosine in kept)
    if by_others or not (pull > DECAY_WATCH or shrunk < SHRUNK):
        return
    yield Finding("decay-fights",
        "act" if shrunk < SHRUNK or (pull > DECAY_ACT and suffers(record)) else "watch",
        _decay_words(decay, pull, shrunk),
        (*((Evidence("pull of the weight decay over that of the gradient", pull, DECAY_WATCH,
                     step=0),) if decay else ()),
         Evidence("norm of the parameters, last over first", shrunk, SHRUNK)),
        (Advice("use no weight decay", "no-decay"),
         Advice("use a tenth of the weight decay", "less-decay")) if decay else
        (Advice("if the loss contains a penalty on the weights, use a tenth of it, or none"),),
        "A lower learning rate weakens gradient and decay alike: their ratio stays the same."
        * (pull > DECAY_WATCH), against=LOWER_RATES)  # fmt: skip


def _decay_words(decay: float, pull: float, shrunk: float) -> str:
    norm = f"the norm of the parameters ends at {shrunk:.3g} times its first value"
    if pull > DECAY_WATCH:
        return (f"At the first step, weight decay ({decay:g}) pulls {pull:.3g} times as hard as "
                f"the gradient, and {norm}.")  # fmt: skip
    if decay:
        return f"With a weight decay of {decay:g}, {norm}."
    return f"Without weight decay, {norm}: a penalty in the loss may shrink them."


def first_pull(record: Record, decay: float) -> float:
    """Return ‖decay · θ‖ over the norm of the update that it is added to, at the first step.

    The update is the gradient, or Adam's unit steps. Later steps are less informative: where decay
    wins, weights shrink until it and the gradient balance.
    """
    size = record.gradient_norms[0] if record.gradient_norms else math.nan
    if _decoupled(record):
        size = math.sqrt(record.facts.trainable)
    return decay * record.parameter_norms[0] / size if size > 0 else math.nan


def _decoupled(record: Record) -> bool:
    decoupled = record.facts.settings.get("decoupled_weight_decay")
    return bool(decoupled) or record.facts.optimizer in ("AdamW", "Lion", "Adafactor", "Muon")


@fault(
    "projection-fights",
    "Other code changes the weights",
    shown_by=lambda record: by_layer(record, "projection_cosine"),
)
def projection_fights(record: Record) -> Iterator[Finding]:
    """Find code besides the optimizer that changes the weights, after its step or within it."""
    kept = by_layer(record, "projection_cosine")
    undone = {p: -t.value for p, t in kept.items() if t.below(PROJECTED)}
    first = _first_cosines(record)
    within = {p: -t.value for p, t in first.items() if t.below(FIRST_STEP) and t.above(-FIRST_STEP)}
    hidden = len(within) > len(kept) / 2 and not _decay_turns(record)
    if not undone and not hidden:
        return
    applied = by_layer(record, "applied_cosine")
    layers = worst_first(undone or within)
    uphill = any(p in applied and applied[p].below(0) for p in layers)
    worst = layers[:3]
    yield Finding("projection-fights", "act" if uphill or suffers(record) else "watch",
        f"Code that runs after the optimizer's step changes the weights of "
        f"{named(record, worst[0])} again: the change that remains has a cosine of "
        f"{kept[worst[0]].value:.3g} with the optimizer's step." if undone else
        _within_words(record, worst[0], -within[worst[0]]),
        (*(Evidence("projection_cosine", kept[p].value, PROJECTED, p) for p in worst if undone),
         *(Evidence("parameter_cosine", -within[p], FIRST_STEP, p, 0)
           for p in worst if p in within and hidden),
         *(Evidence("applied_cosine", applied[p].value, 0, p) for p in worst if p in applied)),
        (Advice("train without the code that changes the weights besides the optimizer (a trial "
                "can remove hooks of the optimizer and max_norm, but not changes by the loss or by "
                "forward())", "no-projection"),
         Advice("project the gradient onto the constraint before the step")),
        "With a higher learning rate, the other code undoes more of each step." * bool(undone),
        layers=layers, against=HIGHER_RATES)  # fmt: skip


def _within_words(record: Record, layer: str, cosine: float) -> str:
    """Describe a first step with a low cosine to its gradient.

    The first step of plain gradient descent is its gradient; another optimizer's may have a low
    cosine by itself.
    """
    where, read = named(record, layer), f"has a cosine of {cosine:.3g} with its gradient"
    if record.facts.optimizer in ("SGD", "ASGD"):
        return (f"Code that runs within the step changes the weights of {where}: the first step, "
                f"which depends on no earlier gradient, {read}.")  # fmt: skip
    optimizer = record.facts.optimizer or "the optimizer"
    return (f"The first step of {where}, which depends on no earlier gradient, {read}: code within "
            f"the step changes the weights, or {optimizer} itself turns the step because a few "
            "entries of the gradient are far larger than the others.")  # fmt: skip


def _decay_turns(record: Record) -> bool:
    """Return whether weight decay exceeds the gradient at the first step and so turns it."""
    return bool(record.parameter_norms) and first_pull(record, _decay(record)) > DECAY_ACT


def _decay(record: Record) -> float:
    setting = record.facts.settings.get("weight_decay")
    return float(setting) if isinstance(setting, int | float) else 0.0


def _first_cosines(record: Record) -> dict[str, Typical]:
    """Return `parameter_cosine` of the first step: 1 for gradient descent, ‖g‖₁/(√n·‖g‖₂) for Adam.

    It is empty for an optimizer that was resumed and so has a past.
    """
    if record.facts.resumed:
        return {}
    first = at_first(record, "parameter_cosine")
    return first[0] if first and record.reports[0].step == 0 else {}


@fault("optimizer-turns", "The optimizer turns the step away from the gradient", shown_by=stepped)
def optimizer_turns(record: Record) -> Iterator[Finding]:
    """Find steps that go uphill or follow gradients of many steps ago.

    In the user's own run, an optimizer with `maximize=True` goes uphill on purpose.
    """
    if not record.is_audited and any(report.maximize for report in record.reports):
        return
    cosines = by_layer(record, "parameter_cosine")
    turned = {p: -t.value for p, t in cosines.items() if t.below(0)}
    descents = [r.descent for r in record.reports[1:] if r.descent is not None]
    uphill = fmean(d < 0 for d in descents) if len(descents) >= 3 else 0.0
    # Where the loss has settled, half of the steps go uphill by chance: 1.5 deviations more count.
    half = 0.5 + 0.75 / math.sqrt(max(len(descents), 1))
    by_steps, by_layers = uphill > half, len(turned) > len(cosines) / 2
    late = _late_cosine(record)
    lasts = 1 / (1 - _momentum(record))
    outlasts = is_long_enough(record) and lasts > LONGER_THAN_THE_RUN * record.facts.steps
    stale = _momentum(record) > LONG_MOMENTUM and (suffers(record) or late < STALE or outlasts)
    if by_steps:
        said = (f"{uphill:.0%} of the measured steps go uphill: by the gradient of their own "
                "batch, they raise the loss.")  # fmt: skip
    elif by_layers:
        said = (f"In {len(turned)} of {len(cosines)} layers, the optimizer's step typically points "
                "uphill with respect to the gradient of that step.")  # fmt: skip
    elif stale:
        there_are = f" (the run has {record.facts.steps})" * outlasts
        said = (f"A momentum of {_momentum(record):g} keeps each gradient for {lasts:.0f} "
                f"steps{there_are}: the weights keep moving in old directions after the gradient "
                "has turned.")  # fmt: skip
    else:
        return
    layers = worst_first(turned)
    yield Finding("optimizer-turns", "act" if suffers(record) or outlasts else "watch", said,
        (*((Evidence("share of steps uphill", uphill, half),) if by_steps else ()),
         *((Evidence("momentum", _momentum(record), LONG_MOMENTUM),) if stale else ()),
         Evidence("parameter_cosine, second half of the run", late, STALE),
         *(Evidence("parameter_cosine", cosines[p].value, 0, p) for p in layers[:3])),
        tuple(_straightened(record)), layers=layers)  # fmt: skip


def _straightened(record: Record) -> Iterator[Advice]:
    """Yield advice on steps that don't follow their gradient: its sign, momentum, or other code."""
    plain = record.facts.optimizer == "SGD"
    if _sign_is_wrong(record):
        yield Advice("look for maximize=True, or for code that changes the gradient's sign "
                     "before the step")  # fmt: skip
    if _momentum(record) or not plain:
        # Another optimizer's learning rate does not carry over to plain gradient descent.
        rate = " with learning rate 0.1" * (not plain)
        yield Advice(_less_momentum(record), "less-momentum")
        if "momentum" in record.facts.settings and _momentum(record) > USUAL:
            yield Advice(f"use a momentum of {USUAL:g} at the same learning rate", "usual-momentum")
        yield Advice(f"use plain gradient descent{rate}")
    elif not _sign_is_wrong(record):
        yield Advice("look for code that changes gradients or weights "
                     "between backward() and the step")  # fmt: skip


def _sign_is_wrong(record: Record) -> bool:
    """Return whether the first step already goes uphill, which no momentum can explain."""
    if record.facts.settings.get("maximize") is True:
        return True
    if not (first := _first_cosines(record)):
        return False
    descent = record.reports[0].descent
    uphill = descent is not None and descent < 0
    return uphill or median(t.value for t in first.values()) < 0


def _less_momentum(record: Record) -> str:
    if not _momentum(record):
        return "use less momentum (a smaller β₁)"
    less = less_momentum(_momentum(record))
    if "betas" in record.facts.settings:
        return f"use less momentum: β₁ = {less:g}"
    return f"use less momentum: {less:g}, with the same long-run learning rate"


def _momentum(record: Record) -> float:
    """Return the share of the last step's direction that the next one keeps; 0 if it is unknown."""
    settings = record.facts.settings
    betas = settings.get("betas")
    found = betas[0] if isinstance(betas, list | tuple) and betas else settings.get("momentum", 0)
    return float(found) if isinstance(found, int | float) and found < 1 else 0.0


def _late_cosine(record: Record) -> float:
    """Return all layers' median `parameter_cosine` over the second half of the measured steps."""
    readings = [r for report in record.reports for r in report.layers.values()]
    late = readings[len(readings) // 2 :]
    known = [r.parameter_cosine for r in late if r.parameter_cosine is not None]
    return median([c for c in known if not math.isnan(c)] or [1.0])
