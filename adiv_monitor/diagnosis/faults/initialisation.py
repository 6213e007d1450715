"""Is the model fit to begin with?

First what is frozen, normalisations, dropout and weights as they are made; then what they make of a
batch: outputs that are the same for all samples, or become so; last the gradient on its way back.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, takewhile

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import fell, is_long_enough
from adiv_monitor.diagnosis.faults.could_train import goes_badly, strength
from adiv_monitor.diagnosis.faults.fault import LEARNING, LONG_STEPS, Number, fault, finds, told
from adiv_monitor.diagnosis.faults.inputs import LARGE_STD, seen_inputs
from adiv_monitor.diagnosis.faults.rates import clip_norm, suffers
from adiv_monitor.diagnosis.faults.units import ALL_DEAD, DEAD_ACT, dead_share
from adiv_monitor.diagnosis.finding import (
    HIGHER_RATES,
    LOWER_RATES,
    Advice,
    Evidence,
    Finding,
    act_if,
)
from adiv_monitor.diagnosis.readings import named
from adiv_monitor.diagnosis.record import Fact, Record
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import listed

# Smallest relative change of the outputs, when inputs are exchanged between samples, of a model
# that uses its inputs: rounding alone gives 1e-7.
INPUT_MATTERS = 1e-4
ALIKE_ROWS = 1e-3  # scale_cv below which all rows count as equal
# Share of the outputs' first variation that is left of it: the outputs are nearly the same.
COLLAPSED = 0.2
BESIDE = 0.05  # of the passes; a few are the rest of an epoch, or steps that a scaler skipped
# First loss over that of a constant prediction. Torch's initialisations keep it below 1.5.
FIRST_LOSS = 3.0
FAR = 3.0  # times a limit is far beyond it
# The gain that torch initialises with, 1/√3, and the sampling error for some thousand weights.
UNTRAINED, ABOUT = 3**-0.5, 0.03
# torch draws entries within ±1/√fan-in. Rounding to 16 bits moves them beyond by less than this
# share; training usually moves some further.
ROUNDED = 0.01
# rms of a weight's entries · √fan-in, the factor on the length of signals: 0.58 as torch
# initialises, 1.4 by He.
SMALL_GAIN, LARGE_GAIN = 0.1, 5.0
# Transformers draw all weights with a standard deviation of 0.02: those of few inputs have a small
# gain, as in the position biases of Swin Transformer V2, which have two.
USUAL_RMS = 0.018
LARGE_BIAS = 1.0  # rms; standardised inputs give outputs of about 0.6
ALIKE = 0.5  # share of units that equal another
# ‖gradient‖ of the first layer over that of the last: AUTOTRAINER's limits (X. Zhang et al., ICSE
# 2021), there of weights' gradients. Healthy nets read 0.03 to 3; an untrained EfficientNet 76.
VANISHED, EXPLODED = 1e-3, 70.0
# Gradients shrink or grow on their way through all layers, not only those that a finding names.
_AGAIN, _LAYER_NORM, _BATCH_NORM = (Advice(text, fix, everywhere=True) for text, fix in (
    ("initialise all weights again, scaled by their fan-in", "reinitialise"),
    ("add layer normalisation in front of all layers", "layer-norm"),
    ("add batch normalisation in front of all layers", "batch-norm")))  # fmt: skip
_SKIP = Advice("add skip connections: each block's input to its output", everywhere=True)
DEEP = 10  # layers, from which on trained networks have skip connections
DROPS = 0.9  # rate of a dropout that lets next to nothing pass


@fault("frozen", "Frozen parameters", certain=True, explains=("cannot-overfit", "behind-reference"))
def frozen(record: Record) -> Iterator[Finding]:
    """Find parameters with requires_grad=False; they are unlikely to be meant if untrained."""
    if not (names := record.wiring.frozen):
        return
    paths = {name.rpartition(".")[0] for name in names}
    untrained = [path for path, w in record.weights.items() if path in paths
                 and abs(w.gain - UNTRAINED) < ABOUT and w.largest < 1 + ROUNDED]  # fmt: skip
    each = listed([f"'{name}'" for name in names])
    yield Finding("frozen", act_if(untrained and suffers(record)),
        f"No step trains the parameters {each}: requires_grad is False."
        + f" Weights that look like torch's initialisation: {listed(untrained)}." * bool(untrained),
        (Evidence("frozen parameters", len(names)),),
        (Advice("set requires_grad=True, unless these parameters should stay frozen"),),
        layers=names)  # fmt: skip


told(__name__, "batch-norm-starved", "Batch normalisation of too few values", suffers,
     "These batch normalisations compute mean and variance from {values:.0f} values in each "
     "channel: {all_places}.",
     Number("values of a channel", "values", below=5),
     Advice("use LayerNorm or GroupNorm instead"),
     Advice("use larger batches"), of_modules=True, acts_below=1.0)  # fmt: skip


told(__name__, "dropout-too-high", "Dropout rate too high", suffers,
     "{place} drops {rate:.0%} of its input.",
     Number("dropout rate", "rate", above=0.7),
     Advice("use a dropout rate of 0.1, the share to drop", "dropout-0.1"),
     explains=(*LONG_STEPS, "rate-too-high", "cannot-overfit", "behind-reference"),
     acts_below=0.5)  # fmt: skip


@finds("monitor")
def dropout_rises(record: Record) -> Iterator[Finding]:
    """Find a dropout rate at which next to nothing passes, as one that rises without a limit."""
    rates = [report.dropout for report in record.reports]
    high = [r.step for r in record.reports if r.dropout >= DROPS]
    if len(high) >= read.FEWEST_REPORTS:
        yield Finding("dropout-too-high", strength(record),
            f"From step {high[0]:,} on, a dropout drops up to {max(rates):.0%} of its input.",
            (Evidence("dropout rate", max(rates), DROPS),),
            (Advice("use a dropout rate of 0.1, the share to drop"),), since=high[0])  # fmt: skip


_SAID = {
    "loss": "the first loss is {value:.3g}, but a constant prediction has a loss of {chance:.3g}",
    "gain": "{layer} multiplies the length of signals by {value:.3g}",
    "bias": "the biases of {layer} have an rms of {value:.3g}",
    "alike": "{value:.0%} of the units of {layer} equal another unit, and will stay equal",
}


@fault("bad-initialisation", "Unsuitable initialisation")
def bad_initialisation(record: Record) -> Iterator[Finding]:
    """Find weights that make signals grow or fade, units that begin alike, a high first loss.

    Weights that were trained, or loaded, are no initialisation.
    """
    evidence = (*_first_loss(record), *_gains(record))
    if not evidence or record.trained:
        return
    layers = tuple(dict.fromkeys(e.layer for e in evidence if e.layer is not None))
    first = {e.measure: e for e in reversed(evidence)}
    # Healthy architectures begin with some losses of a few times the limit (MNASNet), and choose
    # large biases in front of a softplus (Mamba).
    far = "loss" in first and record.losses[0] > FAR * FIRST_LOSS * (record.chance or math.inf)
    unusual = bool(first.keys() & {"gain", "alike"})
    harmful = far or "alike" in first or (unusual and suffers(record))
    harmful |= bool(layers) and dead_share(record) > DEAD_ACT
    said = [words.format(layer=named(record, first[measure].layer or ""),
                         value=first[measure].value, chance=record.chance or 0.0)
            for measure, words in _SAID.items() if measure in first]  # fmt: skip
    yield Finding("bad-initialisation", act_if(harmful),
        f"The initial weights are unsuitable: {'; '.join(said)}.", evidence,
        (Advice("initialise the weights again, scaled by their fan-in (He for ReLU, Xavier for "
                "tanh)", "reinitialise"),
         Advice("add layer normalisation in front of the layers", "layer-norm")),
        "With a lower learning rate, training needs longer to undo a bad start.", layers=layers,
        since=0, against=LOWER_RATES)  # fmt: skip


def _first_loss(record: Record) -> Iterator[Evidence]:
    """Yield evidence of a high first loss, unless large inputs explain it.

    Multiples of a loss mean nothing if it may be below zero. Losses that multiply their scores, as
    ArcFace, begin high on purpose: an audit knows their scale, reports do not.
    """
    least = min((*record.losses, *(t.loss for t in record.rates.values())), default=-1.0)
    limit = FIRST_LOSS * (record.chance or math.inf)
    large = any(seen.std > LARGE_STD for seen in seen_inputs(record).values())
    judged = record.is_audited or goes_badly(record)
    if record.losses and least >= 0 and not large and judged and record.losses[0] > limit > 0:
        yield Evidence("loss", record.losses[0], limit, step=0)


def _gains(record: Record) -> Iterator[Evidence]:
    """Yield evidence of gains and biases out of range, and of units that begin alike.

    The last layers are exempt, since they may begin small. A gain of zero is accepted, since ends
    of branches may begin at zero, and so is a small one of entries of a usual size. Weights may be
    scaled by their fan-out, so that a gain is too large only if that of gradients is, too. In front
    of a normalisation any gain is accepted. A parameter that no layer holds may be scaled by other
    code, so that only large gains count, and only if the run suffers. Units that begin alike stay
    alike if those of the next layer are alike, too.
    """
    for path, weight in record.weights.items():
        if weight.bare and weight.gain > LARGE_GAIN and suffers(record):
            yield Evidence("gain", weight.gain, LARGE_GAIN, path, 0)
    layers = {path: weight for path, weight in record.weights.items() if not weight.bare}
    for path, weight in [*layers.items()][:-1]:
        if weight.normalised or weight.last:
            continue
        if min(weight.gain, weight.gradient_gain) > LARGE_GAIN:
            yield Evidence("gain", weight.gain, LARGE_GAIN, path, 0)
        elif 0 < weight.gain < SMALL_GAIN and weight.rms < USUAL_RMS:
            yield Evidence("gain", weight.gain, SMALL_GAIN, path, 0)
        if weight.bias > LARGE_BIAS:
            yield Evidence("bias", weight.bias, LARGE_BIAS, path, 0)
    alike = {path: weight.alike for path, weight in layers.items() if weight.alike > ALIKE}
    if len(alike) > 1 and next(iter(layers)) in alike:
        yield from (Evidence("alike", share, ALIKE, path, 0) for path, share in alike.items())


def _lost(record: Record) -> list[Fact]:
    """Return the module, without parameters, that loses the inputs in front of the first layer."""
    return [x for x in record.found_by("outputs-constant") if "before" in x.words]


told(__name__, "outputs-constant", "The same outputs for all samples",
     lambda record: suffers(record) or (is_long_enough(record) and not fell(record)),
     "At the start, the outputs of {class} '{place}' are the same for all samples, although its "
     "inputs are not. So are the model's outputs.",
     Number("share of the outputs that varies", "share"),
     Advice("look at this layer: its weight may be 0, it may normalise over a single number, or "
            "what reaches it may be too small next to its bias"),
     # Another finding says so.
     unless=lambda record: record.found_by("softmax-of-one") or _lost(record)
     or dead_share(record) > ALL_DEAD,
     of_modules=True, explains=(*LEARNING, "input-ignored"))  # fmt: skip


# A stop-gradient may keep outputs apart in the end: those that still vary are only to be watched.
told(__name__, "collapsed", "All samples get the same outputs",
     lambda record: any(fact.numbers["after"] < COLLAPSED * fact.numbers["before"]
                        for fact in record.found_by("collapsed")),
     "The outputs of different samples become alike: {before:.2g} of their mean square varies "
     "between samples at the start, {after:.2g} after training. With the same outputs for all, the "
     "loss would be {loss:.3g}, as low.",
     Number("share of the outputs that varies", "after"),
     Advice("add negative pairs, a variance term, or a stop-gradient"),
     where=lambda fact: "zero" not in fact.words, explains=LEARNING)  # fmt: skip
told(__name__, "collapsed", "", "watch",
     "The outputs shrink towards 0 (mean square {before:.2g} at the start, {after:.2g} after "
     "training): with outputs of 0 for all inputs, the loss would be {loss:.2g}.",
     Number("mean square of the outputs", "after"),
     Advice("add a term that 0 does not solve, such as data, a boundary value or a norm"),
     where=lambda fact: "zero" in fact.words)  # fmt: skip


@fault("input-ignored", "The inputs make no difference", certain=True)
def input_ignored(record: Record) -> Iterator[Finding]:
    """Find inputs that make no difference, unless dead units or vanishing gradients explain it.

    They explain nothing where inputs are lost before the first layer, all of whose rows are alike.
    """
    matters, first = record.wiring.input_matters, read.maps(record)[:1]
    spread = read.typical(record, first[0], "scale_cv") if first else None
    lost = bool(_lost(record)) or (spread is not None and spread.value < ALIKE_ROWS)
    explained = dead_share(record) >= ALL_DEAD or (spread is not None and any(vanishing(record)))
    if matters < INPUT_MATTERS and (lost or not explained):
        yield Finding("input-ignored", "act",
            "The outputs hardly change when inputs are exchanged between samples."
            + "".join(f" {x.words['class']} {x.place!r} loses them." for x in _lost(record)),
            (Evidence("input_matters", matters, INPUT_MATTERS),),
            (Advice("look in forward() for inputs that are zeroed, or not used"),))  # fmt: skip


def _from_the_start(record: Record) -> bool:
    """Return whether a report is of the first step, and of enough layers."""
    return len(read.maps(record)) >= read.FEWEST_LAYERS and record.reports[0].step == 0


@fault("vanishing", "Vanishing gradients", shown_by=_from_the_start)
def vanishing(record: Record) -> Iterator[Finding]:
    """Find gradients that hardly reach the first layers from the start.

    A gradient of exactly zero does not count: it has not vanished on a long path, but met dead
    units or a cut, which other rules find.
    """
    ratios, deep = gradient_ratios(record), len(read.maps(record)) >= DEEP
    if 0 < max(ratios.values(), default=0.0) < VANISHED:
        yield _on_the_way(record, ratios, VANISHED, Finding(
            "vanishing", act_if(suffers(record)), advice=(*[_SKIP] * deep, _LAYER_NORM, _BATCH_NORM,
            _AGAIN, Advice("use ReLU-like activation functions"), *[_SKIP] * (not deep)),
            not_advised="With a higher learning rate, the last layers move too far before the "
            "first ones move.", against=HIGHER_RATES))  # fmt: skip


def _on_the_way(record: Record, ratios: dict[int, float], limit: float,
                finding: Finding) -> Finding:  # fmt: skip
    """Return the finding with the gradients at the first of these steps."""
    report = next(r for r in record.reports if r.step in ratios)
    norms, ratio = read.heard(record, report), ratios[report.step]
    ends = (first, last) = _first(report, norms), list(norms)[-1]
    off = [p for p, norm in norms.items() if (norm < limit * norms[last]) == (limit < 1)]
    return replace(finding,
        summary=f"The gradient at {named(record, first)} is {ratio:.3g} times as large as that at "
        f"{named(record, last)}.",
        evidence=(Evidence("gradient of the first over the last layer", ratio, limit),
                  *(Evidence("gradient of the activations", norms[p], layer=p) for p in ends)),
        layers=tuple(off), since=report.step)  # fmt: skip


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
        norms = read.heard(record, report)
        if len(norms) >= read.FEWEST_LAYERS and (last := list(norms.values())[-1]) > 0:
            at_first = (norms[_first(report, norms)], *read.looked_up(report).values())
            found[report.step] = max(at_first) / last
    return found


def _first(report: StepReport, norms: dict[str, float]) -> str:
    """Return the layer with the largest gradient among those with the same input as the first one.

    Queries and keys come first in a transformer and get little gradient while attention is even;
    the values beside them get more. Rows with the same scales count as the same rows, for at most
    three layers: behind a normalisation all rows have the same scale.
    """
    begin, *others = list(norms)[:3]
    same = takewhile(lambda path: read.of_same_rows(report.layers, begin, path), others)
    return max([begin, *same], key=norms.__getitem__)


@fault("exploding", "Exploding gradients", shown_by=_from_the_start)
def exploding(record: Record) -> Iterator[Finding]:
    """Find gradients that grow on their way to the first layers from the start."""
    ratios = gradient_ratios(record)
    if min(ratios.values(), default=0.0) > EXPLODED:
        far = next(iter(ratios.values())) > FAR * EXPLODED
        yield _on_the_way(record, ratios, EXPLODED, Finding(
            "exploding", act_if(far and suffers(record)), advice=(_AGAIN, _LAYER_NORM,
            Advice(f"clip the gradient's norm at {clip_norm(record):.3g}", "clip")),
            not_advised="Clipping alone does not change the ratio of the layers' gradients.",
            against=("clip",)))  # fmt: skip


# Monte-Carlo dropout is meant to.
told(__name__, "dropout-in-eval", "Dropout in evaluation mode", "watch",
     "{place} drops {rate:.0%} in evaluation mode, too: two evaluations of the same batch differ.",
     Number("dropout rate", "rate", above=0.0),
     Advice("use nn.Dropout, or pass training=self.training"))  # fmt: skip


told(__name__, "running-statistics", "Running statistics that are no average", "watch",
     "These batch normalisations have a momentum of {momentum:g}: {all_places}. It is the share of "
     "the last batch in the statistics of evaluation mode.",
     Number("momentum", "momentum"),
     Advice("use a momentum of about 0.1: it is the share of the new batch"),
     of_modules=True, shown_by=read.reported("norm_passes"))  # fmt: skip


@finds("monitor")
def passes_without_a_step(record: Record) -> Iterator[Finding]:
    """Find passes in training mode, as of a validation, beside those of the steps.

    Each step has as many as there mostly are between two measured ones (micro-batches, views),
    where that is a whole number: the last of an epoch may have fewer, and later ones have more.
    """
    seen = [(r.step, r.norm_passes) for r in record.reports if r.norm_passes is not None]
    between = [(t - s, n - m) for (s, m), (t, n) in pairwise(seen)]
    whole = [n // steps for steps, n in between if steps and not n % steps]
    each = max(whole, key=whole.count, default=0)
    all_, without = (sum(n - each * k * s for s, n in between) for k in (0, 1))
    if 0 < each >= whole[-1] and without > BESIDE * all_:
        yield Finding("running-statistics", "watch",
            f"Of {all_:,} passes in training mode, which running statistics took in, {without:,} "
            "belong to no step, as where a validation runs in training mode.",
            (Evidence("share of passes without a step", without / all_, BESIDE),),
            (Advice("call model.eval() before each validation, and model.train() after it"),)
            )  # fmt: skip
