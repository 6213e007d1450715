"""Can anything be learnt from the data, and are they of a scale that learning rates expect?

Do inputs and labels differ, do batches, and are they shuffled? Is the target among the features, or
moved against its image, and do the labels belong to the inputs at all? Then values that are not
finite, or may soon not be; the inputs' scale and mean, the targets' scale,
and the lengths of rows. What was not observed of the inputs, the first layer's readings tell. What
became not finite in training is asked about in `states`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import PEAK, is_measure, is_unbounded, start
from adiv_monitor.diagnosis.faults.could_train import FEWEST_SAME
from adiv_monitor.diagnosis.faults.fault import (
    LEARNING,
    Number,
    act_if,
    fault,
    finds,
    reported,
    told,
)
from adiv_monitor.diagnosis.faults.rates import clip_norm, overshoot, suffers
from adiv_monitor.diagnosis.faults.units import DEAD_ACT, dead_share
from adiv_monitor.diagnosis.finding import LOWER_RATES, RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import InputStatistics, Record
from adiv_monitor.report import LayerReading

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0
# Share of the target's variance that one feature explains; what is left may be rounding.
DETERMINED = 0.9999
# Correlation of pixels with moved targets; and that with the targets as they are, over it.
FITS, BETTER = 0.2, 0.5
MIXED = 0.15  # share of the targets that fit their images better flipped
# A small network explains more than this share of unseen labels, and the model less than this share
# of what that explains; labels that a model of theirs explains so little of, with so many samples
# of each class, may not belong to their inputs.
EXPLAINS, BEHIND, LEARNT, PER_CLASS = 0.3, 0.25, 0.15, 20
# What does not differ → words for it, of the fact's numbers and words.
_CONSTANT = {
    "input": "All entries of input '{input}' are {value:g}",
    "inputs": "All inputs are equal",
    "labels": "All labels are {value:g}",
    "ignored": "In {share:.0%} of the batches, the loss ignores all targets (ignore_index is "
    "{index:.0f}), and is NaN",
    "rest": "The loss ignores {share:.0%} of the targets (ignore_index is {index:.0f}), and all "
    "others are {value:g}",
}


@fault("constant-data", "Data without differences", certain=True, explains=(
       *LEARNING, "exploding", "input-mean", "input-scale", "labels-unrelated", "non-finite",
       "same-batch"))  # fmt: skip
def constant_data(record: Record) -> Iterator[Finding]:
    """Find data without any difference to learn from: in inputs, labels, or the targets left.

    Of an input that never varies, others do.
    """
    for fact in record.found_by("constant-data"):
        of, mask = fact.words["of"], "index" in fact.numbers
        among = f" in {fact.numbers['samples']:.0f} samples" if "samples" in fact.numbers else ""
        coded = fact.words.get("type") == "integer"
        yield Finding("constant-data", "note" if coded else act_if(of != "input"),
            _CONSTANT[of].format(**fact.numbers, **fact.words) + f"{among}.",
            (Evidence("different values", 1.0, 1.0, step=0),),
            (Advice("check the mask that chooses the targets to ignore, and that ignore_index is "
                    "no class: the default is -100" if mask else
                    "look for the step of the preparation after which they are "
                    "equal"),))  # fmt: skip


@finds("monitor")
def equal_rows(record: Record) -> Iterator[Finding]:
    """Find that, in every measured step, all rows with a gradient of the first layer are equal."""
    firsts = [(path, x) for r in record.reports for path, x in [*r.layers.items()][:1]]
    known = [(path, x) for path, x in firsts if _active(x) > 1 and not x.non_finite]
    if len(known) >= FEWEST_SAME and all(_are_equal(x) for _, x in known):
        path = known[0][0]
        yield Finding("constant-data", act_if(suffers(record) and is_measure(record)),
            f"In every measured step, all samples have the same input to '{path}'.",
            (Evidence("different inputs", 1.0, 1.0, path),),
            (Advice("look for the step of the preparation after which they are equal"),)
            )  # fmt: skip


def _active(reading: LayerReading) -> int:
    """Return how many of the rows that were examined have a gradient."""
    return reading.rows_seen - reading.rows_without_gradient


def _are_equal(reading: LayerReading) -> bool:
    """Return whether all rows of a plain map are equal; its measures are NaN if they are all 0."""
    common, spread = reading.common_share, reading.scale_cv
    if common is None or spread is None or reading.kind not in read.PLAIN:
        return False
    return not (common <= 1 - EQUAL or spread >= EQUAL)


@fault("same-batch", "The same batch is repeated", of="monitor", certain=True,
       explains=("cannot-overfit", "behind-reference"),
       shown_by=lambda r: len(r.reports) >= FEWEST_SAME and reported("batch")(r))  # fmt: skip
def one_batch(record: Record) -> Iterator[Finding]:
    """Find inputs that are equal in all measured steps, and in the step after each."""
    sums = {r.batch for r in record.reports} | {r.next_batch for r in record.reports[:-1]}
    if len(record.reports) >= FEWEST_SAME and len(sums) == 1 and sums.pop():
        yield Finding("same-batch", "note",
            "Every measured step saw the same batch. That is meant, if these are all your data.",
            (Evidence("different batches in the measured steps", 1, 1),),
            (Advice("check that the data loader gives a new batch in each step"),))  # fmt: skip


_DIFFERENT = [Number("different batches", "different")]
_SEEN = ("The number of different batches is {different:.0f}, out of {batches:.0f}: the model "
         "never sees the rest of the data.")  # fmt: skip
_LOADER = Advice("check which samples the loader returns (shuffle=True), and take a new batch for "
                 "each step: next(iter(loader)) begins again")  # fmt: skip
told(__name__, "same-batch", "", "note", _SEEN, _DIFFERENT, _LOADER,
     where=lambda fact: fact.words["of"] == "one")  # fmt: skip
told(__name__, "same-batch", "", "act", _SEEN, _DIFFERENT, _LOADER,
     where=lambda fact: fact.words["of"] == "batches")  # fmt: skip
told(__name__, "same-batch", "", "watch",
     "At most {share:.0%} of the samples of a batch differ from each other; the rest repeat them.",
     [Number("share of a batch's samples that differ", "share")],
     Advice("check whether the dataset uses its index, and the sampler"),
     where=lambda fact: fact.words["of"] == "samples",
     not_advised="Larger batches of the same samples teach no more.", against=())  # fmt: skip


told(__name__, "unshuffled", "The data are not shuffled",
     lambda record: record.found_by("unshuffled")[0].numbers["ratio"] < SORTED,
     "The labels within a batch vary {ratio:.3g} times as much as in shuffled batches: the data "
     "are sorted.",
     [Number("variance of labels in a batch, over shuffled ones", "ratio", below=UNSHUFFLED),
      Number("distance from these, in deviations", "z", below=-DEVIATIONS)],
     Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),
     not_advised="Larger batches of sorted data are sorted too.", against=(),
     certain=True)  # fmt: skip


told(__name__, "target-leak", "A feature that is the target", "watch",
     "Feature {feature:.0f} of {place} determines the target of all {samples:.0f} samples: the "
     "model can copy it.",
     [Number("share of the target that a feature explains", "share", above=DETERMINED)],
     Advice("leave the target out of the inputs"))  # fmt: skip


told(__name__, "targets-moved", "Targets that are transposed or flipped", suffers,
     "The targets of pixels fit the images better if they are moved ('{move}'): their correlation "
     "is then {best:.2g} instead of {own:.2g}.",
     [Number("correlation of the pixels with moved targets", "best", above=FITS),
      Number("correlation of the pixels with their targets", "own")],
     Advice("compare the axes and transforms of images and targets"),
     where=lambda fact: fact.numbers.get("own", 1.0) < BETTER * fact.numbers.get("best", 0.0),
     explains=LEARNING)  # fmt: skip


told(__name__, "targets-moved", "", suffers,
     "{share:.0%} of the targets of pixels fit their images better if they are flipped ('{move}'), "
     "and the others do not.",
     [Number("share of the targets that fit better flipped", "share", above=MIXED,
            below=1 - MIXED)],
     Advice("flip images and targets together"), where=lambda fact: "share" in fact.numbers
     )  # fmt: skip


@fault("labels-unrelated", "Labels that no model predicts")
def labels_unrelated(record: Record) -> Iterator[Finding]:
    """Find labels that neither a small network nor the model predicts better than by chance."""
    for fact in record.found_by("behind-reference"):
        reference, own, error = (fact.numbers[name] for name in ("reference", "model", "error"))
        enough = fact.numbers["per class"] >= PER_CLASS
        if enough and reference <= error and own <= max(error, LEARNT):
            yield Finding("labels-unrelated", "watch",
                "Neither a small network nor this model predicts the labels of "
                f"{fact.numbers['held out']:.0f} samples better than a constant prediction does. "
                "Check whether the labels belong to their inputs.",
                (Evidence("share of unseen labels that it explains", reference, error),),
                (Advice("look at ten samples and their labels"),))  # fmt: skip


@fault("state-carried", "Outputs that depend on the batch before")
def state_carried(record: Record) -> Iterator[Finding]:
    """Find outputs that depend on the batch before.

    A queue and running statistics are meant to, and so is the state of series that go on.
    """
    for fact in record.found_by("state-carried"):
        mixes, suffering = fact.words["of"] == "sample", suffers(record)
        if (goes_on := fact.words.get("goes on")) != "yes":
            strength = act_if(goes_on == "no" and suffering)
            yield Finding("state-carried", strength if mixes or suffering else "note",
                "The outputs for a batch depend on the batch before it, with the same weights."
                + " Each sample takes over the state of another sample." * mixes,
                (Evidence("share of outputs that change", fact.numbers["outputs"], 0.0),),
                (Advice("begin each batch with a fresh state, unless series go on"),),
                since=0)  # fmt: skip


_UNREAD = "The loss never reads tensor {unread:.0f} of the batch (shape {shape}), "
_PLACE = Advice("look for the place in the loss where this tensor belongs, and for another that "
                "stands there")  # fmt: skip
told(__name__, "batch-part-unread", "A part of the batch that the loss never reads", "watch",
     _UNREAD + "although it reads tensor {read:.0f} of the same shape.",
     [Number("number of the tensor in the batch", "unread")], _PLACE,
     where=lambda fact: "read" in fact.numbers)  # fmt: skip
told(__name__, "batch-part-unread", "", "watch",
     _UNREAD + "which is 0 or 1 for each sample, as masks and ends of episodes are.",
     [Number("number of the tensor in the batch", "unread")], _PLACE,
     where=lambda fact: "read" not in fact.numbers)  # fmt: skip


STEP = "the update"  # beginning of `Record.first_non_finite` if the optimizer made the value
# Smallest size of divisors of both signs, over their median: 0.02 in 64 normal numbers, 1 for
# divisors of one size.
CLOSE = 0.1
HUGE = 30.0  # largest result of a division over the median one; 6 for 4,096 normal numbers
DATA = "data"  # value of `Record.first_non_finite` if the value came with a batch
# Standard deviation of the inputs. Initialisations assume 1; pixels in [0, 1] have about 0.3.
LARGE_STD, SMALL_STD = 5.0, 0.2
FAR_TOO_LARGE = 50.0  # at 30 to 100 AdamW's loss, too, is 1.2 to 2 times that at 1 (thresholds.md)
SHORT_ROW = 0.5  # ‖x‖²: sparse rows, such as one-hot, have small entries but a length of about 1
# Largest standard deviation of a feature over the median one.
UNEVEN_FEATURES = 10.0
# A layer reads an input as it is if the rms of its rows' entries is that of the input, up to this.
READ_AS_IT_IS = 3.0
# Share of the inputs' mean square that is their features' means.
COMMON_SHARE_WATCH, COMMON_SHARE_ACT = 0.5, 0.75
# The same share in the first layer's rows, if the inputs were not observed. It includes patches and
# places, so that healthy images, pixels in [0, 1] and margins that are always black, have up to
# 0.8.
MOSTLY_MEAN = 0.9
# Loss of a constant prediction: the mean square of the targets for squared errors; log of the
# number of classes for cross-entropy, which is 11 for 50,000.
LARGE_TARGETS = 30.0
# std / mean over samples of ‖x‖².
LENGTH_CV_WATCH, LENGTH_CV_ACT = 1.0, 2.0
# An audited run whose first loss is this many times that of a constant prediction begins worse than
# a model with the same answer to all inputs.
FAR_ABOVE_CHANCE = 2.0
EQUAL = 1e-5  # what is left of the rows' spread in single precision
_AFFINE_LIKE = Advice(
    "use an affine-like layer as the first layer: it divides each row by its length", "affine-like"
)


@fault("non-finite", "Values that are not finite", certain=True, shown_by=lambda record: True)
def non_finite_from_the_start(record: Record) -> Iterator[Finding]:
    """Find values that are not finite in the data, the initial weights or the first loss."""
    if is_broken(record) and not by_training(record):
        yield non_finite(record)


def is_broken(record: Record) -> bool:
    """Return whether some value is not finite."""
    return record.first_non_finite is not None or not all(map(math.isfinite, record.losses))


def by_training(record: Record) -> bool:
    """Return whether values became not finite in training; other findings are likely the cause."""
    if record.first_non_finite == DATA or _by_loss(record):
        return False
    if record.is_audited:
        return len(record.losses) > 1
    return record.non_finite_since != 0 or (record.first_non_finite or "").startswith(STEP)


def _by_loss(record: Record) -> bool:
    """Return whether the loss alone makes the value, as log(0) does, and no step was too long.

    Otherwise it comes at the end of losses that rise.
    """
    finite = [*filter(math.isfinite, record.losses)]
    usual = record.is_audited and finite and max(finite) < PEAK * abs(start(record))
    return bool(usual) and record.first_non_finite == "loss" and overshoot(record) is None


def non_finite(record: Record) -> Finding:
    """Return the finding of the first value that is not finite."""
    where = record.first_non_finite or "loss"
    losses = dict(zip(record.steps_of_losses, record.losses, strict=False))
    bad = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
    step = bad if record.non_finite_since is None else record.non_finite_since
    before = [r.step for r in record.reports if r.step < (step or 0)]
    at = f" at {clip_norm(record):.2g}" * bool(record.gradient_norms)
    by_steps = (Advice("lower the learning rate", "rate*0.1"),
                Advice(f"clip the gradient's norm{at}", "clip"))  # fmt: skip
    return Finding("non-finite", "act",
        f"Step {step or 0:,} is the first with values that are not finite. The first one is in: "
        f"{where}."
        # Values between measured steps are unknown.
        + (f" At step {before[-1]:,} all were finite." if before and not record.is_audited else "")
        + " The outputs are finite, and the losses before it are no larger than usual."
        * _by_loss(record),
        (Evidence(where, math.nan if bad is None else losses[bad], step=step),),
        (*by_steps * by_training(record),
         Advice(f"look for NaN and infinite entries in the batches up to step {step or 0:,}, and "
                "for log(0), x/0, sqrt(0) and half precision in the place named here")),
        "Replacing NaN by 0 (nan_to_num) hides where they come from.", since=step,
        against=())  # fmt: skip


def _is_spread(record: Record) -> bool:
    return suffers(record) or any(f.strength == "act" for f in row_spread(record))


told(__name__, "unsafe-division", "Division by numbers close to zero", _is_spread,
     "{place} divides by numbers of both signs, some of them close to zero: the largest result is "
     "{times:.3g} times the median one.",
     [Number("smallest divisor over the median one", "close", below=CLOSE),
      Number("largest result over the median one", "times", above=HUGE)],
     Advice("divide by something positive, such as a norm"),
     not_advised="A small constant added to the divisors only moves the zero.", against=(),
     explains=(*LEARNING, "exploding", "non-finite", "row-spread"))  # fmt: skip


@fault("input-scale", "Inputs of an unsuitable scale", about="inputs", shown_by=read.entering,
       acts_below=1.0)  # fmt: skip
def input_scale(record: Record) -> Iterator[Finding]:
    """Find inputs, or features of them, far larger or smaller than initialisations assume."""
    for name, seen in _inputs(record).items():
        evidence, std = [], seen.std / _long_rows(record)
        if std > LARGE_STD:
            evidence = [Evidence("input std", seen.std, LARGE_STD, name)]
        elif 0 < seen.std < SMALL_STD and seen.std * seen.std * seen.features < SHORT_ROW:
            evidence = [Evidence("input std", seen.std, SMALL_STD, name)]
        if seen.feature_std_ratio > UNEVEN_FEATURES:
            ratio = seen.feature_std_ratio
            evidence.append(Evidence("feature std ratio", ratio, UNEVEN_FEATURES, name))
        if evidence and _is_read(record, seen):
            said = " and ".join(f"{found.measure} {found.value:.3g}" for found in evidence)
            for path in read.maps(record)[:1]:  # a measure, so that pictures show it
                if (length := read.typical(record, path, "scale_mean")) is not None:
                    evidence.append(Evidence("scale_mean", length.value, None, path))
            yield Finding("input-scale", act_if(_costs(record, seen.std)),
                f"The entries of input {name!r} have an unsuitable scale ({said}): "
                "initialisations and learning rates expect a standard deviation of about 1 in each "
                "feature.", tuple(evidence),
                (Advice("standardise the inputs: subtract the mean of each feature (channel), and "
                        "divide by its standard deviation", "standardise-inputs"),
                 Advice("divide the inputs by one constant"), _AFFINE_LIKE),
                "A lower learning rate suits the first layer, and slows down all others."
                * (std > LARGE_STD), layers=read.maps(record)[:1], against=LOWER_RATES)  # fmt: skip


def _inputs(record: Record) -> Mapping[str, InputStatistics]:
    """Return the statistics of the inputs by name; if none was observed, of the first layer's rows.

    The layer's path is then the name. The rows' mean counts only if it is most of their mean
    square.
    """
    if record.inputs or (found := read.entering(record)) is None:
        return record.inputs
    path, rms = found
    # Later, units may have died: the few rows that still get a gradient are alike.
    began = replace(record, reports=record.reports[:1])
    common = read.typical(began, path, "common_share")
    rows = max(map(_active, read.readings(began, path).values()), default=0)
    is_mostly_mean = common is not None and common.above(MOSTLY_MEAN) and rows > 1
    share = common.value if common is not None and is_mostly_mean else 0.0
    mean, std = rms.value * math.sqrt(share), rms.value * math.sqrt(max(0.0, 1 - share))
    features, nan = next(iter(read.readings(record, path).values())).features or 0, math.nan
    return {path: InputStatistics(mean, std, nan, nan, 0.0, nan, nan, features)}


def _is_read(record: Record, seen: InputStatistics) -> bool:
    """Return whether a layer may read an input as it is, beside others perhaps.

    A model may scale its inputs itself, or normalise them: then no layer has rows of their size, or
    of a size that is as far off. Without readings it is not known.
    """
    sizes = [
        rows.value for path in read.maps(record) if (rows := read.entries(record, path)) is not None
    ]
    rms = math.hypot(seen.mean, seen.std)
    alike = any(rms / READ_AS_IT_IS < size < READ_AS_IT_IS * rms for size in sizes)
    return not sizes or alike or (seen.std > LARGE_STD and max(sizes) > LARGE_STD) or (
        seen.std < SMALL_STD and min(sizes) < SMALL_STD)  # fmt: skip


def _long_rows(record: Record) -> float:
    """Return √(mean / median) of the rows' scale: how far a few long rows raise the rms."""
    seen = [
        read.typical(record, p, m)
        for p in read.maps(record)[:1]
        for m in ("scale_mean", "scale_p50")
    ]
    mean, middle = (t.value if t is not None else math.nan for t in seen or (None, None))
    return max(1.0, math.sqrt(mean / middle)) if mean >= 0 and middle > 0 else 1.0


def _is_normalised(record: Record, layer: str) -> bool:
    """Return whether the layer right behind holds the gain of a normalisation."""
    for report in record.reports:
        paths = list(report.layers)
        if layer in paths[:-1]:
            behind = paths[paths.index(layer) + 1]
            return read.readings(record, behind)[report.step].kind == "gain"
    return False


def _costs(record: Record, std: float = 0.0) -> bool:
    """Return whether the first layer trains badly, which makes an unusual input a fault.

    It does not if a normalisation right behind it removes the scale, or if the optimizer's step
    does not depend on the scale while the loss begins where it should and falls. Units may be dead
    for other reasons, unless entries are far too large. If inputs were not
    observed, the loss tells, or entries that are far too large for any optimizer.
    """
    normalised = any(_is_normalised(record, first) for first in read.maps(record)[:1])
    if not record.inputs:
        return suffers(record) or (std > FAR_TOO_LARGE and not normalised)
    known = record.chance is not None and bool(record.losses)
    bad_start = known and record.losses[0] > FAR_ABOVE_CHANCE * abs(start(record))
    flat = dead_share(record) > DEAD_ACT and not 0 < std < FAR_TOO_LARGE
    harmed = bad_start or suffers(record) or flat
    return not normalised and (harmed or not read.scale_free(record))


@fault("input-mean", "Inputs that are not centred", about="inputs", shown_by=read.entering)
def input_mean(record: Record) -> Iterator[Finding]:
    """Find inputs that are far from centred, so that all rows share one long common vector."""
    shares = read.by_layer(record, "common_share").values()
    # A model may centre inputs: then the rows of no layer share much of their length.
    centred = bool(shares) and all(share.value < COMMON_SHARE_WATCH for share in shares)
    for name, seen in _inputs(record).items():
        share = common_share(seen)
        if share > COMMON_SHARE_WATCH and _is_read(record, seen) and not centred:
            yield Finding("input-mean", act_if(share > COMMON_SHARE_ACT and _costs(record)),
                f"{share:.0%} of the mean square of input {name!r} is due to the mean, "
                "which all samples share: each step moves all samples in the same direction.",
                (Evidence("common share", share, COMMON_SHARE_WATCH, name),),
                (Advice("standardise the inputs, or subtract the mean of each feature (channel)",
                        "standardise-inputs"),),
                "Dividing by a constant or by each row's length does not remove the mean.",
                # Which layer reads which of several inputs is not known.
                layers=read.maps(record)[:1] if len(record.inputs) < 2 else (),
                against=("affine-like",))  # fmt: skip


def common_share(seen: InputStatistics) -> float:
    """Return the share of the inputs' mean square that is due to their features' means, 0 to 1."""
    # A product overflows to infinity, where a power raises an error.
    square, spread = seen.mean * seen.mean, seen.feature_mean_spread * seen.feature_mean_spread
    share = (square + spread) / whole if (whole := square + seen.std * seen.std) > 0 else 0.0
    return 0.0 if math.isnan(share) else min(1.0, share)


@fault("target-scale", "Targets, or a loss, of a very large scale", explains=LEARNING)
def target_scale(record: Record) -> Iterator[Finding]:
    """Find a loss that is large by its unit, from large targets or a sum over the batch."""
    if record.chance is not None and record.chance > LARGE_TARGETS and not is_unbounded(record):
        faulty = suffers(record) or not all(map(math.isfinite, record.losses))
        smaller_steps = (Advice("learning rate × 0.1", "rate*0.1"),
                         Advice("use AdamW with learning rate 0.001", "adamw"))  # fmt: skip
        yield Finding("target-scale", "act" if faulty else "note",
            f"A model whose outputs are all zero has a loss of {record.chance:.3g}: the targets "
            "are in large units, or the loss is a sum.",
            (Evidence("loss of a constant prediction", record.chance, LARGE_TARGETS, step=0),),
            (Advice("standardise the targets, or use the mean of the loss instead of its sum"),
             *(() if read.scale_free(record) else smaller_steps)),
            "Clipping the gradient's norm makes all steps equally long.",
            against=("clip",))  # fmt: skip


@fault("row-spread", "Rows of very different length", about="inputs", shown_by=read.maps)
def row_spread(record: Record) -> Iterator[Finding]:
    """Find rows of very different length, of which the long ones determine the step."""
    first = read.maps(record)[:1]
    lengths = [seen.length_cv for seen in record.inputs.values()]
    path = first[0] if first else None
    spread = read.typical(record, path, "scale_cv") if path is not None else None
    spread = spread or read.Typical(max(lengths, default=0.0), 0.0)
    if spread.above(LENGTH_CV_WATCH):
        far = spread.above(LENGTH_CV_ACT)
        yield Finding("row-spread", "act" if far else "watch" if suffers(record) else "note",
            f"The standard deviation of the row scale ‖φ‖² is {spread.value:.3g} times its mean"
            + ": a few long rows determine each step, and the others hardly count" * far + ".",
            (Evidence("scale_cv", spread.value, LENGTH_CV_WATCH, path, spread.since),
             *(Evidence("length_cv of inputs", cv) for cv in lengths)),
            (_AFFINE_LIKE,
             Advice("look at the longest samples: they may be outliers")),
            "Neither one constant scale nor another learning rate makes the rows more alike.",
            layers=first, since=spread.since, against=RATES)  # fmt: skip
