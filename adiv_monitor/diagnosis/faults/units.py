"""Do units take part?

Are the logits bounded, are units dead or saturated, and are gradients always clipped?
"""

import math
from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.diagnosis.faults.fault import act_if, fault, finds
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.remedies import clip_norm
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.readings import maps, scale_free, these, worst_first
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import layer_words

# Share of a layer's units that no row of any batch activates; SageMaker Debugger's rule, too, fires
# at half the layer. A smaller share is a note: ReLU networks that train well have it, too.
DEAD_NOTE, DEAD_ACT = 0.25, 0.5
ALL_DEAD = 0.9  # next to nothing passes, however the loss develops so far
# Fewer batches prove little: zeros in one batch are no fault (DeepDiagnosis took 36 % of healthy
# runs for faulty, nearly all by this).
LEAST_BATCHES = 4
LEAST_LATE = 3  # measured steps in the second half of a run, if units themselves were not observed
# Share of entries in the flat parts: SageMaker Debugger's rule fires at half the layer; healthy
# tanh nets have up to 0.35.
SATURATED_WATCH, SATURATED_ACT = 0.4, 0.5
# Functions with two flat ends; zeros of a ReLU are no saturation.
FLAT_AT_BOTH_ENDS = frozenset(
    ("tanh", "sigmoid", "hardtanh", "hardsigmoid", "softsign", "relu6", "erf")
)
# Share of clipped steps; above half, a lower learning rate is the better fix (Google's deep
# learning tuning playbook).
CLIPPED_SHARE = 0.5
CLIPPED_FAR = 10.0


@fault("bounded-logits", "Logits of too narrow a range", acts_below=1.0)
def bounded_logits(record: Record) -> Iterator[Finding]:
    """Find logits within ±1 by their construction, not by an activation function on them."""
    if record.activated_output is not None or record.double_softmax:
        return
    for fact in record.found_by("bounded-logits"):
        floor, classes = fact.numbers["floor"], fact.numbers["classes"]
        yield Finding("bounded-logits", act_if(suffers(record)),
            f"The logits of {fact.place} stay between −1 and 1 even if all weights are ten times "
            f"as large. With {classes:.0f} classes, its loss can't fall below {floor:.3g}.",
            (Evidence("share of the logits within ±1", fact.numbers["share"], 0.9),),
            (Advice("multiply the logits by 10 to 30, or a learnt factor", "logits-times-10"),),
            "A higher learning rate does not widen the range of the logits.",
            against=HIGHER_RATES)  # fmt: skip


@fault("dead-units", "Dead units")
def dead_units(record: Record) -> Iterator[Finding]:
    """Find units that are constant over all rows and so never learn."""
    if not record.units:
        yield from _dead_by_measures(record)
    dead = {path: share for path, share in _dead_shares(record).items() if share > DEAD_NOTE}
    if layers := worst_first(dead):
        share = dead[layers[0]]
        act = share > ALL_DEAD or (share > DEAD_ACT and suffers(record))
        yield _dead(layers, "act" if act else "watch" if share > DEAD_ACT else "note",
            f"{share:.0%} of the units of {_function(record, layers[0])} are dead: their values "
            "lie where the function is flat, for every row of "
            f"{record.units[layers[0]].batches} batches.",
            [Evidence("dead share of units", dead[p], DEAD_NOTE, p) for p in layers])  # fmt: skip


def dead_share(record: Record) -> float:
    """Return the largest share of dead units of a layer; 0 if too few batches were observed."""
    return max(_dead_shares(record).values(), default=0.0)


def _dead_shares(record: Record) -> dict[str, float]:
    return {
        path: units.dead / units.units
        for path, units in record.units.items()
        if units.batches >= LEAST_BATCHES and units.units
    }


def _dead_by_measures(record: Record) -> Iterator[Finding]:
    """Find layers that no row sends a gradient to, while layers behind them get one.

    The second half of the measured steps decides, since a branch may begin at zero.
    """
    late = [report.layers for report in record.reports[len(record.reports) // 2 :]]
    if len(late) < LEAST_LATE:
        return
    paths = [path for path in maps(record) if all(path in layers for layers in late)]
    idle = [path for path in paths if all(layers[path].idle_share == 1 for layers in late)]
    alive = [path for path in paths if path not in idle]
    layers = tuple(path for path in idle if alive and paths.index(path) < paths.index(alive[-1]))
    if layers:
        first = next(r for r in record.reports if layers[-1] in r.layers
                     and r.layers[layers[-1]].idle_share == 1)  # fmt: skip
        yield _dead(layers, "act",
            f"No row sends a gradient to {these(record, layers)}, but layers behind receive one: "
            "all units between them are dead, or the gradient is cut there.",
            [Evidence("idle_share", 1.0, ALL_DEAD, p) for p in layers], first.step)  # fmt: skip


def _dead(layers: tuple[str, ...], strength: Strength, said: str, seen: list[Evidence],
          since: int | None = None) -> Finding:  # fmt: skip
    return Finding("dead-units", strength, said, tuple(seen[:5]),
        (Advice("initialise the weights before these units again", "reinitialise"),
         Advice("use leaky ReLU instead", "leaky-relu"),
         Advice("add batch normalisation in front of these units", "batch-norm")),
        "With a higher learning rate, still no gradient passes a dead unit.", layers=layers,
        since=since, against=HIGHER_RATES)  # fmt: skip


def _function(record: Record, path: str) -> str:
    """Return the name and path of an activation function as words for a sentence."""
    return layer_words(path, record.units[path].function)


@fault("saturated-units", "Saturated units")
def saturated_units(record: Record) -> Iterator[Finding]:
    """Find activation functions with many entries where they are flat and pass no gradient."""
    saturated = {
        path: u.saturated
        for path, u in record.units.items()
        if u.function in FLAT_AT_BOTH_ENDS
        and u.batches >= LEAST_BATCHES
        and u.saturated > SATURATED_WATCH
    }
    if layers := worst_first(saturated):
        yield Finding("saturated-units",
            act_if(saturated[layers[0]] > SATURATED_ACT and suffers(record)),
            f"{saturated[layers[0]]:.0%} of the entries of {_function(record, layers[0])} are "
            "saturated: they lie where the function is flat.",
            tuple(Evidence("saturated share", saturated[p], SATURATED_WATCH, p)
                  for p in layers[:5]),
            (Advice("initialise the weights before these functions again", "reinitialise"),
             Advice("add layer normalisation in front of these functions", "layer-norm")),
            "A higher learning rate drives the entries further into the flat parts.", layers=layers,
            against=HIGHER_RATES)  # fmt: skip


@finds()
def clipping_always(record: Record) -> Iterator[Finding]:
    """Find clipping of most steps, so that the gradient's length no longer counts."""
    limit = record.facts.clip_norm
    norms = [norm for norm in record.gradient_norms if not math.isnan(norm)]
    if limit is None or not norms:
        return
    share, far = fmean(norm > limit for norm in norms), median(norms) / limit
    if share > CLIPPED_SHARE:
        costs = far > CLIPPED_FAR and not scale_free(record.facts)
        yield Finding("clipping-always", act_if(costs and suffers(record)),
            f"{share:.0%} of the gradients are clipped. Their typical norm is {far:.3g} times the "
            "limit.",
            (Evidence("share of steps clipped", share, CLIPPED_SHARE),
             Evidence("gradient norm over the clipping limit", far, CLIPPED_FAR)),
            (Advice("use no clipping", "no-clip"),
             Advice(f"clip at {clip_norm(record):.3g}, the 90th percentile of the norms"),
             Advice("learning rate × 0.3", "rate*0.3")),
            "Another limit changes little: the optimizer's steps do not depend on a constant "
            "factor." * scale_free(record.facts), against=("no-clip", "clip"))  # fmt: skip
