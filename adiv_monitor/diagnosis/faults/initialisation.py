"""Is the model fit to begin with?

First normalisations, dropout and weights as they are made; then what they make of a batch: outputs
that are the same for all samples, or become so; last the gradient on its way back.
"""

import math
from collections.abc import Iterator
from itertools import takewhile

from adiv_monitor.diagnosis.course import fell, is_long_enough
from adiv_monitor.diagnosis.faults.fault import FEWEST_LAYERS, LEARNING, act_if, fault, finds
from adiv_monitor.diagnosis.faults.inputs import LARGE_STD
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.remedies import clip_norm
from adiv_monitor.diagnosis.faults.samples import places
from adiv_monitor.diagnosis.faults.units import ALL_DEAD, DEAD_ACT, dead_share
from adiv_monitor.diagnosis.finding import HIGHER_RATES, LOWER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import heard, looked_up, maps, named, of_same_rows, typical
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import StepReport

# Smallest relative change of the outputs, when inputs are exchanged between samples, of a model
# that uses its inputs: rounding alone gives 1e-7.
INPUT_MATTERS = 1e-4
ALIKE_ROWS = 1e-3  # scale_cv below which all rows count as equal
# Share of the outputs' first variation that is left of it: the outputs are nearly the same.
COLLAPSED = 0.2
# What to do about outputs that are the same for all samples, by what makes them so.
FROM_CONSTANT = {
    "weight": "initialise its weight with other values than 0; that of a normalisation with 1",
    "norm": "normalise over more than one number, or remove the normalisation",
    "zeros": "initialise the layer in front of it again, or make it wider",
}
# Standard deviation of a query's scores before training. Divided by √d, the products of independent
# queries and keys of unit variance have 1 (Vaswani et al. 2017, section 3.2.1); at 2.5, a key at
# two deviations gets e⁵ = 150 times the weight of the mean key.
SPREAD = 2.5
# First loss over that of a constant prediction. Torch's initialisations keep it below 1.5.
FIRST_LOSS = 3.0
FAR = 3.0  # times a limit is far beyond it
# rms of a weight's entries · √fan-in, the factor on the length of signals: 0.58 as torch
# initialises, 1.4 by He.
SMALL_GAIN, LARGE_GAIN = 0.1, 5.0
# Transformers draw all weights with a standard deviation of 0.02: those of few inputs have a small
# gain, as in the position biases of Swin Transformer V2, which have two.
USUAL_RMS = 0.018
# Gains between which weights are as drawn by Xavier's initialisation, 1, or He's, √2.
LEAST_DRAWN, MOST_DRAWN = 0.8, 1.7
LARGE_BIAS = 1.0  # rms; standardised inputs give outputs of about 0.6
ALIKE = 0.5  # share of units that equal another
# ‖gradient‖ of the first layer over that of the last: AUTOTRAINER's limits (X. Zhang et al., ICSE
# 2021), there of weights' gradients. Healthy nets read 0.03 to 3; an untrained EfficientNet 76.
VANISHED, EXPLODED = 1e-3, 70.0
# Gradients shrink or grow on their way through all layers, not only those that a finding names.
_AGAIN, _LAYER_NORM, _BATCH_NORM = (
    Advice(text, fix, everywhere=True)
    for text, fix in (
        ("initialise all weights again, scaled by their fan-in", "reinitialise"),
        ("add layer normalisation in front of all layers", "layer-norm"),
        ("add batch normalisation in front of all layers", "batch-norm"),
    )
)
# Loss of the trained model with dropout over the loss without: a third of the loss is due to
# dropout.
DROPOUT_COSTS = 1.5


@fault("batch-norm-starved", "Batch normalisation of too few values", acts_below=1.0)
def batch_norm_starved(record: Record) -> Iterator[Finding]:
    """Find batch normalisations whose statistics are computed from a handful of values."""
    if facts := record.found_by("batch-norm-starved"):
        values = min(fact.numbers["values"] for fact in facts)
        yield Finding("batch-norm-starved", act_if(suffers(record)),
            f"These batch normalisations compute mean and variance from {values:.0f} values in "
            f"each channel: {places(facts)}.",
            (Evidence("values of a channel", values, 4, facts[0].place, 0),),
            (Advice("use LayerNorm or GroupNorm instead", "group-norm"),
             Advice("use larger batches")),
            layers=tuple(fact.place for fact in facts), since=0)  # fmt: skip


@fault("dropout-too-high", "Dropout rate too high", explains=("cannot-overfit", "behind-reference"),
       acts_below=0.5)  # fmt: skip
def dropout_too_high(record: Record) -> Iterator[Finding]:
    """Find dropout that drops more than it keeps, and compare the losses with and without it."""
    if facts := record.found_by("dropout-too-high"):
        worst = max(facts, key=lambda fact: fact.numbers["rate"])
        rate, with_it, without = (worst.numbers[name] for name in ("rate", "with", "without"))
        costs = with_it > DROPOUT_COSTS * without > 0
        yield Finding("dropout-too-high", act_if(suffers(record) or costs),
            f"{worst.place} drops {rate:.0%} of its input."
            + (f" The loss of the trained model is {with_it:.3g} with dropout and {without:.3g} "
               "without.") * (math.isfinite(with_it) and math.isfinite(without)),
            (Evidence("dropout rate", rate, 0.7, worst.place, 0),),
            (Advice("use a dropout rate of 0.1, the share to drop", "dropout-0.1"),),
            since=0)  # fmt: skip


@fault("one-sided-weights", "Initial weights of one sign", acts_below=1.0)
def one_sided_weights(record: Record) -> Iterator[Finding]:
    """Find initial weights that are nearly all of one sign."""
    facts = record.found_by("one-sided-weights")
    if facts and not record.trained:
        worst = max(facts, key=lambda fact: fact.numbers["share"])
        yield Finding("one-sided-weights", act_if(suffers(record)),
            f"Nearly all initial values of {places(facts)} have the same sign: all units of such a "
            "layer return nearly the same value.",
            (Evidence("abs(mean) / rms", worst.numbers["share"], 0.3, worst.place, 0),),
            (Advice("draw the weights around zero, as torch.randn does", "centred-weights"),),
            layers=tuple(fact.place for fact in facts), since=0)  # fmt: skip


@fault("attention-saturated", "Attention that begins saturated", acts_below=0.95, often_meant=True)
def attention_saturated(record: Record) -> Iterator[Finding]:
    """Find attention whose scores differ so much at the beginning that one key gets all weight."""
    facts = record.found_by("attention-saturated")
    worst = max(facts, key=lambda fact: fact.numbers["spread"], default=None)
    if worst is not None and worst.numbers["spread"] > SPREAD:
        size, largest = worst.numbers["spread"], worst.numbers["largest"]
        yield Finding("attention-saturated", "watch",
            f"Before training, the scores of a query at {worst.place} have a standard deviation of "
            f"{size:.3g}, and the softmax gives {largest:.0%} of the weight to one key.",
            (Evidence("standard deviation of a query's scores", size, SPREAD, worst.place, 0),),
            (Advice("divide the scores by the root of the queries' width"),),
            since=0)  # fmt: skip


_SAID = {
    "loss": "the first loss is {value:.3g}, but a constant prediction has a loss of {chance:.3g}",
    "gain": "{layer} multiplies the length of signals by {value:.3g}",
    "bias": "the biases of {layer} have an rms of {value:.3g}",
    "alike": "{value:.0%} of the units of {layer} equal another unit",
}


@fault("bad-initialisation", "Unsuitable initialisation")
def bad_initialisation(record: Record) -> Iterator[Finding]:
    """Find weights that make signals grow or fade, units that begin alike, a high first loss.

    Weights that were trained, or loaded, are no initialisation.
    """
    evidence = (*_first_loss(record), *_gains(record), *_alike(record))
    if not evidence or record.trained:
        return
    layers = tuple(dict.fromkeys(e.layer for e in evidence if e.layer is not None))
    far = any(e.measure == "loss" and e.limit and e.value > FAR * e.limit for e in evidence)
    # Healthy architectures begin with some losses of a few times the limit (MNASNet), and choose
    # large biases in front of a softplus (Mamba).
    unusual = any(e.measure in ("gain", "alike") for e in evidence)
    harmful = far or (unusual and suffers(record)) or (layers and dead_share(record) > DEAD_ACT)
    first = {e.measure: e for e in reversed(evidence)}
    said = [words.format(layer=named(record, first[measure].layer or ""),
                         value=first[measure].value, chance=record.chance or 0.0)
            for measure, words in _SAID.items() if measure in first]  # fmt: skip
    gains = [weight.gain for weight in record.weights.values() if not weight.bare]
    # All layers have the gain that they would have if they were drawn again.
    drawn = bool(gains) and all(LEAST_DRAWN < gain < MOST_DRAWN for gain in gains) and not layers
    again = Advice("initialise the weights again, scaled by their fan-in (He for ReLU, Xavier for "
                   "tanh)", "reinitialise")  # fmt: skip
    yield Finding("bad-initialisation", act_if(harmful),
        f"The initial weights are unsuitable: {'; '.join(said)}.", evidence,
        (*[again] * (not drawn),
         Advice("add layer normalisation in front of the layers", "layer-norm")),
        "With a lower learning rate, training needs longer to undo a bad start.", layers=layers,
        since=0, against=LOWER_RATES)  # fmt: skip


def _first_loss(record: Record) -> Iterator[Evidence]:
    """Yield evidence of a high first loss, unless large inputs explain it.

    Multiples of a loss mean nothing if it may be below zero.
    """
    least = min((*record.losses, *(t.loss for t in record.rates.values())), default=0.0)
    if least < 0 or any(seen.std > LARGE_STD for seen in record.inputs.values()):
        return
    if record.losses and record.losses[0] > FIRST_LOSS * (record.chance or math.inf) > 0:
        yield Evidence("loss", record.losses[0], FIRST_LOSS * (record.chance or math.inf), step=0)


def _gains(record: Record) -> Iterator[Evidence]:
    """Yield evidence of gains and biases out of range.

    The last layers are exempt, since they may begin small. A gain of zero is accepted, since ends
    of branches may begin at zero, and so is a small one of entries of a usual size. Weights may be
    scaled by their fan-out, so that a gain is too large only if that of gradients is, too. In front
    of a normalisation any gain is accepted. A parameter that no layer holds may be scaled by other
    code, so that only large gains count, and only if the run suffers.
    """
    for path, weight in record.weights.items():
        if weight.bare and weight.gain > LARGE_GAIN and suffers(record):
            yield Evidence("gain", weight.gain, LARGE_GAIN, path, 0)
    for path, weight in [pair for pair in record.weights.items() if not pair[1].bare][:-1]:
        if weight.normalised or weight.last:
            continue
        if min(weight.gain, weight.gradient_gain) > LARGE_GAIN:
            yield Evidence("gain", weight.gain, LARGE_GAIN, path, 0)
        elif 0 < weight.gain < SMALL_GAIN and weight.rms < USUAL_RMS:
            yield Evidence("gain", weight.gain, SMALL_GAIN, path, 0)
        if weight.bias > LARGE_BIAS:
            yield Evidence("bias", weight.bias, LARGE_BIAS, path, 0)


def _alike(record: Record) -> Iterator[Evidence]:
    """Yield evidence of units that begin alike.

    Such units get the same gradient and stay alike if those of the next layer are alike, too.
    """
    layers = [path for path, weight in record.weights.items() if not weight.bare]
    alike = [path for path in layers if record.weights[path].alike > ALIKE]
    if len(alike) > 1 and layers[0] in alike:
        yield from (Evidence("alike", record.weights[p].alike, ALIKE, p, 0) for p in alike)


@fault("outputs-constant", "The same outputs for all samples",
       explains=(*LEARNING, "input-ignored"))  # fmt: skip
def outputs_constant(record: Record) -> Iterator[Finding]:
    """Find the module from which on nothing varies over samples, unless all its units are dead."""
    facts = record.found_by("outputs-constant")
    if not facts or record.found_by("softmax-of-one"):
        return
    fact, by = facts[0], facts[0].words["by"]
    if by != "zeros" or dead_share(record) <= ALL_DEAD:
        stands = is_long_enough(record) and bool(record.losses) and not fell(record)
        yield Finding("outputs-constant", act_if(stands or suffers(record)),
            f"At the start, the outputs of {fact.words['class']} '{fact.place}' are the same for "
            "all samples, although its inputs are not. So are the model's outputs.",
            (Evidence("share of the outputs that varies", fact.numbers["share"], 1e-6),),
            (Advice(FROM_CONSTANT.get(by, "look at what reaches this layer: next to its bias, it "
                                          "is too small to make a difference")),),
            layers=(fact.place,))  # fmt: skip


@fault("collapsed", "All samples get the same outputs", explains=LEARNING)
def collapsed(record: Record) -> Iterator[Finding]:
    """Find outputs that become the same for all samples, because the loss is lowest there.

    A stop-gradient may keep them apart in the end: outputs that still vary are only to be watched.
    """
    for fact in record.found_by("collapsed"):
        before, after = fact.numbers["before"], fact.numbers["after"]
        yield Finding("collapsed", act_if(after < COLLAPSED * before),
            f"The outputs of different samples become alike: {before:.2g} of their mean square "
            f"varies between samples at the start, {after:.2g} after training. With the same "
            f"outputs for all, the loss would be {fact.numbers['loss']:.3g}, as low.",
            (Evidence("share of the outputs that varies", after, COLLAPSED * before),),
            (Advice("add negative pairs, a variance term, or a stop-gradient"),))  # fmt: skip


@fault("input-ignored", "The inputs make no difference", certain=True)
def input_lost(record: Record) -> Iterator[Finding]:
    """Find inputs that are lost before the first layer, which causes other findings."""
    paths = maps(record)
    spread = typical(record, paths[0], "scale_cv") if paths else None
    silent = spread is None and record.wiring.input_matters == 0  # no row has a gradient
    alike = spread is not None and spread.value < ALIKE_ROWS
    if (silent and dead_share(record) < ALL_DEAD) or alike:
        yield from _ignored(record)


def _ignored(record: Record) -> Iterator[Finding]:
    matters = record.wiring.input_matters
    if matters < INPUT_MATTERS:
        yield Finding("input-ignored", "act",
            "The outputs hardly change when inputs are exchanged between samples.",
            (Evidence("input_matters", matters, INPUT_MATTERS),),
            (Advice("look in forward() for inputs that are zeroed, or not used"),))  # fmt: skip


def _from_the_start(record: Record) -> bool:
    """Return whether a report is of the first step, and of enough layers."""
    return len(maps(record)) >= FEWEST_LAYERS and record.reports[0].step == 0


@fault("vanishing", "Vanishing gradients", shown_by=_from_the_start)
def vanishing(record: Record) -> Iterator[Finding]:
    """Find gradients that hardly reach the first layers from the start.

    If only reports are known, a gradient of exactly zero does not count: it has not vanished on a
    long path, but met dead units or a cut, which another rule finds. In an audit, one that is zero
    from one layer to the next in all steps has met a function whose derivative is zero.
    """
    ratios = gradient_ratios(record)
    largest = max(ratios.values(), default=math.inf)
    if largest >= VANISHED or not (record.is_audited or largest > 0):
        return
    report, norms, said, evidence = _on_the_way(record, ratios, VANISHED)
    first, (*_, last) = _first(report, norms), norms.values()
    is_zero = any(name.startswith(f"{first}.") for name in record.wiring.zero_gradient)
    if largest == 0 and is_zero and all(n == 0 or n > VANISHED * last for n in norms.values()):
        is_dead = dead_share(record) > DEAD_ACT  # which may be why
        yield Finding("zero-gradient", act_if(suffers(record) and not is_dead), said, evidence,
            (Advice("look between these layers for rounding, sign, argmax, comparisons and clamps, "
                    "whose derivative is 0, and for units that are flat for all rows"),),
            layers=tuple(p for p in norms if norms[p] == 0),
            since=report.step)  # fmt: skip
        return
    yield Finding("vanishing", act_if(suffers(record)), said, evidence,
        (_LAYER_NORM, _BATCH_NORM, _AGAIN,
         Advice("use ReLU-like activation functions, or add residual connections")),
        "With a higher learning rate, the last layers move too far before the first ones move.",
        layers=tuple(p for p in norms if norms[p] < VANISHED * last), since=report.step,
        against=HIGHER_RATES)  # fmt: skip


def _on_the_way(
    record: Record, ratios: dict[int, float], limit: float
) -> tuple[StepReport, dict[str, float], str, tuple[Evidence, ...]]:
    """Return the first of these reports, its norms of gradients, and what they say."""
    report = next(r for r in record.reports if r.step in ratios)
    norms, ratio = heard(record, report), ratios[report.step]
    ends = (first, last) = _first(report, norms), list(norms)[-1]
    return (
        report,
        norms,
        f"The gradient at {named(record, first)} is {ratio:.3g} times as large as that at "
        f"{named(record, last)}.",
        (
            Evidence("gradient of the first over the last layer", ratio, limit),
            *(Evidence("gradient of the activations", norms[path], layer=path) for path in ends),
        ),
    )


def gradient_ratios(record: Record) -> dict[int, float]:
    """Return ‖gradient‖ of the first layer over that of the last by step, at two steps at most.

    A step at which the last layer receives no gradient is left out.

    If a look-up table gets a larger gradient than the first map, it takes the map's place: queries
    and keys, the first maps of many transformers, get little gradient while all tokens attend
    alike. Two steps are used because a last layer that begins at zero passes no gradient at first;
    later steps show effects of training. If a weight begins at zero, as gates of residual branches
    do, they are the last two: gradients behind it begin at zero, too, and grow.
    """
    found = {}
    begins_at_zero = any(weight.gain == 0 for weight in record.weights.values())
    for report in record.reports[-2:] if begins_at_zero else record.reports[:2]:
        norms = heard(record, report)
        if len(norms) >= FEWEST_LAYERS and (last := list(norms.values())[-1]) > 0:
            at_first = (norms[_first(report, norms)], *looked_up(report).values())
            found[report.step] = max(at_first) / last
    return found


def _first(report: StepReport, norms: dict[str, float]) -> str:
    """Return the layer with the largest gradient among those with the same input as the first one.

    Queries and keys come first in a transformer and get little gradient while attention is even;
    the values beside them get more. Rows with the same scales count as the same rows, for at most
    three layers: behind a normalisation all rows have the same scale.
    """
    begin, *others = list(norms)[:3]
    same = takewhile(lambda path: of_same_rows(report.layers, begin, path), others)
    return max([begin, *same], key=norms.__getitem__)


@fault("exploding", "Exploding gradients", shown_by=_from_the_start)
def exploding(record: Record) -> Iterator[Finding]:
    """Find gradients that grow on their way to the first layers from the start."""
    ratios = gradient_ratios(record)
    if min(ratios.values(), default=0.0) > EXPLODED:
        report, norms, said, evidence = _on_the_way(record, ratios, EXPLODED)
        far, (*_, last) = evidence[0].value > FAR * EXPLODED, norms.values()
        yield Finding("exploding", act_if(far and suffers(record)), said, evidence,
            (_AGAIN, _LAYER_NORM,
             Advice(f"clip the gradient's norm at {clip_norm(record):.3g}", "clip")),
            "Clipping alone does not change the ratio of the layers' gradients.",
            layers=tuple(p for p in norms if norms[p] > EXPLODED * last), since=report.step,
            against=("clip",))  # fmt: skip


@finds()
def input_ignored(record: Record) -> Iterator[Finding]:
    """Find inputs that make no difference, unless dead units or vanishing gradients explain it."""
    explained = dead_share(record) > ALL_DEAD or any(vanishing(record))
    if not explained and not any(input_lost(record)):
        yield from _ignored(record)


@fault("dropout-in-eval", "Dropout in evaluation mode")
def dropout_in_eval(record: Record) -> Iterator[Finding]:
    """Find dropout that drops in evaluation mode, too; Monte-Carlo dropout is meant to."""
    if facts := record.found_by("dropout-in-eval"):
        worst = max(facts, key=lambda fact: fact.numbers["rate"])
        yield Finding("dropout-in-eval", "watch",
            f"{worst.place} drops {worst.numbers['rate']:.0%} in evaluation mode, too: two "
            "evaluations of the same batch differ.",
            (Evidence("dropout rate", worst.numbers["rate"], 0, worst.place),),
            (Advice("use nn.Dropout, or pass training=self.training"),))  # fmt: skip


@fault("running-statistics", "Running statistics that are no average")
def running_statistics(record: Record) -> Iterator[Finding]:
    """Find running statistics that stay as they began, or that are those of the last batch."""
    if facts := record.found_by("running-statistics"):
        momentum = facts[0].numbers["momentum"]
        yield Finding("running-statistics", "watch",
            f"These batch normalisations have a momentum of {momentum:g}: {places(facts)}. It is "
            "the share of the last batch in the statistics of evaluation mode.",
            (Evidence("momentum", momentum, 0.9, facts[0].place),),
            (Advice("use a momentum of 0.1 or less: it is the share of the new batch"),),
            layers=tuple(fact.place for fact in facts))  # fmt: skip
