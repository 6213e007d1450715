"""Do units take part?

Are the logits bounded, are units dead or saturated, and are gradients always clipped?
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean, median

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import Number, fault, finds, of_layers, told
from adiv_monitor.diagnosis.faults.rates import clip_norm, suffers
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.readings import maps, scale_free, these, worst_first
from adiv_monitor.diagnosis.record import Record, UnitStatistics
from adiv_monitor.printable import layer_words

# Share of a layer's units that no row of any batch activates; SageMaker Debugger's rule, too, fires
# at half the layer. A smaller share is a note: ReLU networks that train well have it, too.
DEAD_NOTE, DEAD_ACT = 0.25, 0.5
ALL_DEAD = 0.9  # next to nothing passes, however the loss develops so far
# Fewer batches prove little: zeros in one batch are no fault (DeepDiagnosis took 36 % of healthy
# runs for faulty, nearly all by this).
LEAST_BATCHES = 4
# Measured steps in the second half of a run, if units themselves were not observed; and the share
# of them in which no row has a gradient: a few rows may have one now and then.
LEAST_LATE, MOSTLY_IDLE = 3, 0.8
# Share of entries in the flat parts: SageMaker Debugger's rule fires at half the layer; healthy
# tanh nets have up to 0.35.
SATURATED_WATCH, SATURATED_ACT = 0.4, 0.5
# Functions with two flat ends; zeros of a ReLU are no saturation.
FLAT_AT_BOTH_ENDS = {"tanh", "sigmoid", "hardtanh", "hardsigmoid", "softsign", "relu6", "erf"}
# Of the entropy that is possible, mean over heads: 12 healthy runs of small transformers read 0.52
# and more, queries and keys that are each 20 times too large less than 0.02. A first key with most
# of the attention is a sink, which trained language models have.
FEW_KEYS, SINK = 0.05, 0.5
COARSE = 50 * 2**-7  # the step between bfloat16's numbers at a logit of 50; healthy: 11
# Share of clipped steps; above half, a lower learning rate is the better fix (Google's deep
# learning tuning playbook).
CLIPPED_SHARE = 0.5
CLIPPED_FAR = 10.0


told(__name__, "bounded-logits", "Logits of too narrow a range", suffers,
     "The logits of {place} stay between −1 and 1 even if all weights are ten times as large. With "
     "{classes:.0f} classes, its loss can't fall below {floor:.3g}.",
     Number("share of the logits within ±1", "share"),
     Advice("multiply the logits by 10 to 30, or a learnt factor", "logits-times-10"),
     not_advised="A higher learning rate does not widen the range of the logits.",
     against=HIGHER_RATES,
     # By their construction, not by an activation function on them.
     unless=lambda record: record.activated_output is not None,
     acts_below=1.0)  # fmt: skip

_LOOKS = "entropy", "first_share", "logit_max", "logit_step"


def _attends(record: Record) -> dict[str, list[float]]:
    """Return entropy, share of the first key, largest logit, its step: medians of half a run."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for report in record.reports[len(record.reports) // 2 :]:
        for path, x in report.attention.items():
            found[path].append([x.measures().get(f"attention_{of}", math.nan) for of in _LOOKS])
    return {path: [*map(median, zip(*of, strict=True))] for path, of in found.items()}


@fault("attention-saturated", "Attention that looks at single keys", "monitor",
       shown_by=lambda record: read.several(record) and _attends(record))  # fmt: skip
def attention_saturated(record: Record) -> Iterator[Finding]:
    """Find attention whose queries each see one key, not the first, or whose logits are coarse."""
    attends = _attends(record)
    sharp = {p: -x[0] for p, x in attends.items() if x[0] < FEW_KEYS and x[1] < SINK}
    if found := sharp or {p: x[3] for p, x in attends.items() if x[3] > COARSE}:
        path, *_ = layers = worst_first(found)
        entropy, _, logit, step = attends[path]
        of, value, limit = ("entropy", entropy, FEW_KEYS) if sharp else ("logit_step", step, COARSE)
        yield Finding("attention-saturated", act_if(suffers(record)),
            f"In {path}, attention has {entropy:.2g} of the possible entropy (0: each query looks "
            f"at one key), and logits to {logit:.3g}, where q and k have steps of {step:.1g}.",
            (Evidence(f"attention_{of}", value, limit, path),),
            (Advice("normalise queries and keys (QK-norm)"), Advice("lower the rate", "rate*0.3")),
            "A higher learning rate sharpens it further.", layers=layers)  # fmt: skip


@fault("dead-units", "Dead units", explains=("zero-gradient",))
def dead_units(record: Record) -> Iterator[Finding]:
    """Find units that are constant over all rows and so never learn."""
    if not record.units:
        yield from _dead_by_measures(record)
    if dead := _shares(record, _dead, DEAD_NOTE):
        layers = [*dead]
        share, units = dead[layers[0]], record.units[layers[0]]
        act = share > ALL_DEAD or (share > DEAD_ACT and suffers(record))
        yield replace(_DEAD,
            strength="act" if act else "watch" if share > DEAD_ACT else "note",
            summary=f"{share:.0%} of the units of {layer_words(layers[0], units.function)} are "
            "dead: their values lie where the function is flat, for every row of "
            f"{units.batches} batches.",
            evidence=of_layers("dead share of units", dead, DEAD_NOTE),
            layers=tuple(layers))  # fmt: skip


_DEAD = Finding("dead-units", "act", advice=(
    Advice("initialise the weights before these units again", "reinitialise"),
    Advice("use leaky ReLU instead"),
    Advice("add batch normalisation in front of these units", "batch-norm")),
    not_advised="With a higher learning rate, still no gradient passes a dead unit.",
    against=HIGHER_RATES)  # fmt: skip


def dead_share(record: Record) -> float:
    """Return the largest share of dead units of a layer; 0 if too few batches were observed."""
    return max(_shares(record, _dead).values(), default=0.0)


def _shares(
    record: Record, share: Callable[[UnitStatistics], float], above: float = 0.0
) -> dict[str, float]:
    """Return the share of each activation function that ran often enough, largest first."""
    found = {p: share(units) for p, units in record.units.items() if units.batches >= LEAST_BATCHES}
    return {path: found[path] for path in worst_first(found) if found[path] > above}


def _dead(units: UnitStatistics) -> float:
    return units.dead / max(units.units, 1)


def _dead_by_measures(record: Record) -> Iterator[Finding]:
    """Find layers that no row sends a gradient to, while layers behind them get one.

    The second half of the measured steps decides, since a branch may begin at zero.
    """
    late = [report.layers for report in record.reports[len(record.reports) // 2 :]]
    if len(late) < LEAST_LATE:
        return
    paths = [path for path in maps(record) if all(path in layers for layers in late)]
    idle = [p for p in paths if fmean(layers[p].idle_share == 1 for layers in late) > MOSTLY_IDLE]
    alive = [path for path in paths if path not in idle]
    layers = tuple(path for path in idle if alive and paths.index(path) < paths.index(alive[-1]))
    if layers:
        first = next(r for r in record.reports if layers[-1] in r.layers
                     and r.layers[layers[-1]].idle_share == 1)  # fmt: skip
        always = all(x[path].idle_share == 1 for path in layers for x in late)
        yield replace(_DEAD, strength=act_if(always or suffers(record)),
            summary="In most steps, no" * (not always) + "No" * always
            + f" row sends a gradient to {these(record, layers)}, but layers behind "
            "receive one: units between them are dead, weights are zero, or the gradient is cut.",
            evidence=of_layers("idle_share", dict.fromkeys(layers, 1.0), ALL_DEAD),
            layers=layers, since=first.step)  # fmt: skip


@fault("saturated-units", "Saturated units")
def saturated_units(record: Record) -> Iterator[Finding]:
    """Find activation functions with many entries where they are flat and pass no gradient."""
    flat = FLAT_AT_BOTH_ENDS
    if saturated := _shares(record, lambda x: x.saturated * (x.function in flat), SATURATED_WATCH):
        first, *_ = layers = tuple(saturated)
        share, function = saturated[first], record.units[first].function
        yield Finding("saturated-units", act_if(share > SATURATED_ACT and suffers(record)),
            f"{share:.0%} of the entries of {layer_words(first, function)} are saturated: they lie "
            "where the function is flat.",
            of_layers("saturated share", saturated, SATURATED_WATCH),
            (Advice("initialise the weights before these functions again", "reinitialise"),
             Advice("add layer normalisation in front of these functions", "layer-norm")),
            "A higher learning rate drives the entries further into the flat parts.",
            layers=layers, against=HIGHER_RATES)  # fmt: skip


@finds()
def clipping_always(record: Record) -> Iterator[Finding]:
    """Find clipping of most steps, so that the gradient's length no longer counts."""
    limit = record.facts.clip_norm
    norms = [norm for norm in record.gradient_norms if not math.isnan(norm)]
    if limit is None or not norms:
        return
    share, far = fmean(norm > limit for norm in norms), median(norms) / limit
    if share > CLIPPED_SHARE:
        costs = far > CLIPPED_FAR and not scale_free(record)
        yield Finding("clipping-always", act_if(costs and suffers(record)),
            f"{share:.0%} of the gradients are clipped. Their typical norm is {far:.3g} times the "
            "limit.",
            (Evidence("share of steps clipped", share, CLIPPED_SHARE),
             Evidence("gradient norm over the clipping limit", far, CLIPPED_FAR)),
            (Advice("use no clipping", "no-clip"),
             Advice(f"clip at {clip_norm(record):.3g}, the 90th percentile of the norms"),
             Advice("learning rate × 0.3", "rate*0.3")),
            "Another limit changes little: the optimizer's steps do not depend on a constant "
            "factor." * scale_free(record), against=("no-clip", "clip"))  # fmt: skip
