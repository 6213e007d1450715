"""Rules about what happens to the gradient on its way to the weights."""

import math
from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.audit.diagnosis.rates import suffers
from adiv_monitor.audit.diagnosis.seen import by_layer, scale_free, worst_first
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# Decay's pull over the gradient's.
DECAY_WATCH, DECAY_ACT = 0.3, 1.0
# ‖parameters‖ at the end over that at the beginning.
SHRUNK = 0.5
# cos(step as applied, optimizer's step).
PROJECTED_WATCH = 0.7
# Share of steps that are clipped; above half of them a lower rate is the better remedy (Google's
# deep learning tuning playbook).
CLIPPED = 0.5
CLIPPED_FAR = 10.0


def optimizer_turns(record: Record) -> Iterator[Finding]:
    """Steps that typically go uphill: the optimizer's memory outweighs the gradient."""
    descents = [r.descent for r in record.reports[1:] if r.descent is not None]
    if len(descents) < 3:
        return
    uphill = sum(d < 0 for d in descents) / len(descents)
    cosines = by_layer(record, "parameter_cosine")
    turned = {p: -t.value for p, t in cosines.items() if t.below(0)}
    if not uphill > 0.5 and len(turned) <= len(cosines) / 2:
        return
    layers = worst_first(turned)
    yield Finding(
        "optimizer-turns",
        layers,
        "act" if suffers(record) else "watch",
        (
            Evidence("share of steps uphill", uphill, 0.5),
            *(Evidence("parameter_cosine", cosines[p].value, 0, p) for p in layers[:3]),
        ),
        (
            Advice("less momentum (smaller β₁)", "less-momentum"),
            Advice("plain gradient descent", "plain-sgd"),
        ),
        f"{uphill:.0%} of the measured steps go uphill, as their own batch's gradient sees it.",
        "Adam's steps have a low cosine with the gradient in healthy runs too: only below zero it "
        "tells.",
    )


def decay_fights(record: Record) -> Iterator[Finding]:
    """Weight decay that pulls harder than the gradient."""
    decay = record.facts.settings.get("weight_decay")
    if not isinstance(decay, int | float) or not decay > 0 or not record.parameter_norms:
        return
    ratio = pull(record, decay)
    shrunk = record.parameter_norms[-1] / record.parameter_norms[0]
    if not ratio > DECAY_WATCH:
        return
    yield Finding(
        "decay-fights",
        (),
        "act" if (ratio > DECAY_ACT and suffers(record)) or shrunk < SHRUNK else "watch",
        (
            Evidence("pull of the decay over the gradient's", ratio, DECAY_WATCH),
            Evidence("parameters' norm, last over first", shrunk, SHRUNK),
        ),
        (
            Advice("no weight decay", "no-decay"),
            Advice("a tenth of the weight decay", "less-decay"),
        ),
        f"Weight decay ({decay:g}) pulls {ratio:.2g} times as hard as the gradient.",
        "A lower learning rate lowers both and leaves their ratio.",
    )


def pull(record: Record, decay: float) -> float:
    """Median over steps of ‖decay · θ‖ over what it is added to: gradient, or Adam's unit steps."""
    if _decoupled(record):
        size = math.sqrt(record.facts.trainable)
        return decay * median(record.parameter_norms) / size
    pairs = zip(record.parameter_norms, record.gradient_norms, strict=False)
    ratios = [decay * norm / gradient for norm, gradient in pairs if gradient > 0]
    return median(ratios) if ratios else math.nan


def _decoupled(record: Record) -> bool:
    decoupled = record.facts.settings.get("decoupled_weight_decay")
    return bool(decoupled) or record.facts.optimizer in ("AdamW", "Lion", "Adafactor", "Muon")


def projection_fights(record: Record) -> Iterator[Finding]:
    """Code behind the optimizer that undoes part of its step."""
    kept = by_layer(record, "projection_cosine")
    undone = {p: -t.value for p, t in kept.items() if t.below(PROJECTED_WATCH)}
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
            *(Evidence("projection_cosine", kept[p].value, PROJECTED_WATCH, p) for p in layers[:3]),
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
