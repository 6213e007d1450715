"""Rules about what happens to the gradient on its way to the weights."""

import math
from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.audit.diagnosis.rates import suffers
from adiv_monitor.audit.diagnosis.seen import by_layer, scale_free, worst_first
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# A share of the last direction that lasts for 40 steps; 0.9 lasts for 10.
LONG_MOMENTUM = 0.975
# parameter_cosine late in the run; healthy runs with momentum or Adam read 0.25 to 0.5.
STALE = 0.2
# Decay's pull over the gradient's.
DECAY_WATCH, DECAY_ACT = 0.3, 1.0
# ‖parameters‖ at the end over that at the beginning.
SHRUNK = 0.5  # healthy ones grow: 1.1 to 2.9
# cos(step as applied, optimizer's step). Where nothing changes weights after the step it is 1.
PROJECTED = 0.98
# Share of steps that are clipped; above half of them a lower rate is the better remedy (Google's
# deep learning tuning playbook).
CLIPPED = 0.5
CLIPPED_FAR = 10.0


def optimizer_turns(record: Record) -> Iterator[Finding]:
    """Steps that go uphill, or keep to where the gradient pointed many steps ago."""
    cosines = by_layer(record, "parameter_cosine")
    turned = {p: -t.value for p, t in cosines.items() if t.below(0)}
    descents = [r.descent for r in record.reports[1:] if r.descent is not None]
    uphill = fmean(d < 0 for d in descents) if len(descents) >= 3 else 0.0
    against = uphill > 0.5 or len(turned) > len(cosines) / 2
    late = _late_cosine(record)
    stale = _momentum(record) > LONG_MOMENTUM and (suffers(record) or late < STALE)
    if not against and not stale:
        return
    layers = worst_first(turned)
    yield Finding(
        "optimizer-turns",
        layers,
        "act" if suffers(record) else "watch",
        (
            *((Evidence("share of steps uphill", uphill, 0.5),) if against else ()),
            *((Evidence("momentum", _momentum(record), LONG_MOMENTUM),) if stale else ()),
            Evidence("parameter_cosine, second half of the run", late, STALE),
            *(Evidence("parameter_cosine", cosines[p].value, 0, p) for p in layers[:3]),
        ),
        (
            Advice("less momentum (smaller β₁)", "less-momentum"),
            Advice("plain gradient descent", "plain-sgd"),
        ),
        f"{uphill:.0%} of the measured steps go uphill, as their own batch's gradient sees it."
        if against
        else f"Momentum of {_momentum(record):g} keeps each gradient for "
        f"{1 / (1 - _momentum(record)):.0f} steps: it goes on when the loss has turned.",
        "Adam's steps have a low cosine with the gradient in healthy runs too; it tells only where "
        "it is near zero.",
    )


def _momentum(record: Record) -> float:
    """What share of the last step's direction the next one keeps; 0 where that isn't known."""
    settings = record.facts.settings
    betas = settings.get("betas")
    found = betas[0] if isinstance(betas, list | tuple) and betas else settings.get("momentum", 0)
    return float(found) if isinstance(found, int | float) and found < 1 else 0.0


def _late_cosine(record: Record) -> float:
    """The median `parameter_cosine` of all layers over the second half of the measured steps."""
    readings = [r for report in record.reports for r in report.layers.values()]
    late = readings[len(readings) // 2 :]
    known = [r.parameter_cosine for r in late if r.parameter_cosine is not None]
    return median([c for c in known if not math.isnan(c)] or [1.0])


def decay_fights(record: Record) -> Iterator[Finding]:
    """Weight decay that pulls harder than the gradient."""
    decay = record.facts.settings.get("weight_decay")
    if not isinstance(decay, int | float) or not decay > 0 or not record.parameter_norms:
        return
    pull = first_pull(record, decay)
    shrunk = record.parameter_norms[-1] / record.parameter_norms[0]
    if not (pull > DECAY_WATCH or shrunk < SHRUNK):
        return
    yield Finding(
        "decay-fights",
        (),
        "act" if shrunk < SHRUNK or (pull > DECAY_ACT and suffers(record)) else "watch",
        (
            Evidence("pull of the decay over the gradient's", pull, DECAY_WATCH, step=0),
            Evidence("parameters' norm, last over first", shrunk, SHRUNK),
        ),
        (
            Advice("no weight decay", "no-decay"),
            Advice("a tenth of the weight decay", "less-decay"),
        ),
        f"Weight decay ({decay:g}) pulls {pull:.2g} times as hard as the gradient at first; the "
        f"parameters' norm ends at {shrunk:.2g} times what it was.",
        "A lower learning rate lowers both and leaves their ratio.",
    )


def first_pull(record: Record, decay: float) -> float:
    """‖decay · θ‖ over what it is added to at the first step: the gradient, or Adam's unit steps.

    Later ones say less: where decay wins, weights shrink until it and the gradient balance.
    """
    size = record.gradient_norms[0] if record.gradient_norms else math.nan
    if _decoupled(record):
        size = math.sqrt(record.facts.trainable)
    return decay * record.parameter_norms[0] / size if size > 0 else math.nan


def _decoupled(record: Record) -> bool:
    decoupled = record.facts.settings.get("decoupled_weight_decay")
    return bool(decoupled) or record.facts.optimizer in ("AdamW", "Lion", "Adafactor", "Muon")


def projection_fights(record: Record) -> Iterator[Finding]:
    """Code behind the optimizer that undoes part of its step."""
    kept = by_layer(record, "projection_cosine")
    undone = {p: -t.value for p, t in kept.items() if t.below(PROJECTED)}
    if not undone:
        return
    applied = by_layer(record, "applied_cosine")
    layers = worst_first(undone)
    uphill = any(p in applied and applied[p].below(0) for p in layers)
    yield Finding(
        "projection-fights",
        layers,
        "act" if uphill or suffers(record) else "watch",
        (
            *(Evidence("projection_cosine", kept[p].value, PROJECTED, p) for p in layers[:3]),
            *(
                Evidence("applied_cosine", applied[p].value, 0, p)
                for p in layers[:3]
                if p in applied
            ),
        ),
        (
            Advice("train without what changes the weights after the step", "no-projection"),
            Advice("project the gradient onto the constraint before the step"),
        ),
        f"What changes the weights of {layers[0]} after the step turns it: cosine "
        f"{kept[layers[0]].value:.2f} with the optimizer's.",
        "A higher learning rate: the projection grows with the step.",
    )


def clipping_always(record: Record) -> Iterator[Finding]:
    """Clipping as the rule, not the exception: the gradient's length no longer counts."""
    limit = record.facts.clip_norm
    if limit is None or not record.gradient_norms:
        return
    share = fmean(norm > limit for norm in record.gradient_norms)
    far = median(record.gradient_norms) / limit
    if not share > CLIPPED:
        return
    costs = far > CLIPPED_FAR and not scale_free(record.facts)
    yield Finding(
        "clipping-always",
        (),
        "act" if costs and suffers(record) else "watch",
        (
            Evidence("share of steps clipped", share, CLIPPED),
            Evidence("gradient norm over its limit", far, CLIPPED_FAR),
        ),
        (
            Advice("no clipping", "no-clip"),
            Advice("clip at the 90th percentile of the gradient's norms"),
            Advice("learning rate × 0.3, and clip less", "rate*0.3"),
        ),
        f"{share:.0%} of the steps are clipped; typically the gradient is {far:.2g} times as long "
        "as allowed.",
        "With Adam a constant factor on the gradient changes nothing.",
    )
