"""Are values finite, and of a scale that initialisations and learning rates expect?

First what is not finite, or may soon not be; then the inputs' scale and mean, the targets' scale,
and the lengths of rows. What was not observed of the inputs, the first layer's readings tell. What
became not finite in training is asked about in `states`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import PEAK, fell, is_unbounded, start
from adiv_monitor.diagnosis.faults.could_train import goes_badly
from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, fault, told
from adiv_monitor.diagnosis.faults.rates import clip_norm, overshoot, suffers
from adiv_monitor.diagnosis.faults.units import DEAD_ACT, dead_share
from adiv_monitor.diagnosis.finding import LOWER_RATES, RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import InputStatistics, Record
from adiv_monitor.diagnosis.seen import ENTRYWISE

# End of `Record.first_non_finite` if a softmax, or another function, is given a row of −∞ alone.
HIDDEN = ", which gets a row of nothing but -inf: all of its places are masked"
STEP = "the update"  # beginning of `Record.first_non_finite` if the optimizer made the value
LAST = 3  # losses before one that is not finite, which tell whether they rose
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
MANY = 8  # rows that are summed into one
# An audited run whose first loss is this many times that of a constant prediction begins worse than
# a model with the same answer to all inputs.
FAR_ABOVE_CHANCE = 2.0
_AFFINE_LIKE = Advice(
    "use an affine-like layer as the first layer: it divides each row by its length", "affine-like"
)


@fault("non-finite", "Values that are not finite", certain=True, explains=("input-partly-ignored",),
       shown_by=lambda record: True)  # fmt: skip
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
    """Return whether a function makes the value, as log(0) does, and no step was too long.

    Otherwise it comes at the end of losses that rise. In a monitored run, none of the last ones is
    above the first.
    """
    finite, where = [*filter(math.isfinite, record.losses)], record.first_non_finite or ""
    if where.endswith(HIDDEN):
        return True
    usual = len(finite) > LAST and max(finite[-LAST:]) <= finite[0]
    if record.is_audited:
        usual = bool(finite) and max(finite) < PEAK * abs(start(record))
    is_loss = where in ("loss", "the loss") or "(" in where
    return usual and is_loss and overshoot(record) is None


def non_finite(record: Record) -> Finding:
    """Return the finding of the first value that is not finite."""
    where = record.first_non_finite or "loss"
    losses = dict(zip(record.steps_of_losses, record.losses, strict=False))
    bad = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
    step = bad if record.non_finite_since is None else record.non_finite_since
    before = [r.step for r in record.reports if r.step < (step or 0)]
    at = f" at {clip_norm(record):.2g}" * bool(record.gradient_norms)
    own = _by_loss(record)
    steps = [Advice("lower the learning rate", "rate*0.1"),
             Advice(f"clip the gradient's norm{at}", "clip")]  # fmt: skip
    first, last = steps * by_training(record), steps * (own and not record.is_audited)
    return Finding("non-finite", "act",
        f"Step {step or 0:,} is the first with values that are not finite. The first one is in: "
        f"{where}."
        # Values between measured steps are unknown.
        + (f" At step {before[-1]:,} all were finite." if before and not record.is_audited else "")
        + " The losses before it are no larger than usual." * own
        + " Gradients were finite (in float16, Adam's eps of 1e-8 is 0)." * where.startswith(STEP),
        (Evidence(where, math.nan if bad is None else losses[bad], step=step),),
        (*first,
         *[Advice("leave out rows that are wholly masked, or hide places by −1e9 instead of −inf")]
         * where.endswith(HIDDEN),
         Advice(f"look for NaN and infinite entries in the batches up to step {step or 0:,}, and "
                "for log(0), x/0, sqrt(0) and half precision in the place named here"),
         *last),
        "Replacing NaN by 0 (nan_to_num) hides where they come from.", since=step,
        against=())  # fmt: skip


@fault("input-scale", "Inputs of an unsuitable scale", about="inputs", shown_by=read.entering,
       acts_below=1.0)  # fmt: skip
def input_scale(record: Record) -> Iterator[Finding]:
    """Find inputs, or features of them, far larger or smaller than initialisations assume."""
    for name, seen in seen_inputs(record).items():
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
            harms, little = _costs(record, seen.std), std < SMALL_STD and fell(record)
            yield Finding("input-scale", "act" if harms else "note" if little else "watch",
                f"The entries of input {name!r} have an unsuitable scale ({said}): "
                "initialisations and learning rates expect a standard deviation of about 1 in each "
                "feature.", tuple(evidence),
                (Advice("standardise the inputs: subtract the mean of each feature (channel), and "
                        "divide by its standard deviation", "standardise-inputs"),
                 Advice("divide the inputs by one constant"), _AFFINE_LIKE),
                "A lower learning rate suits the first layer, and slows down all others."
                * (std > LARGE_STD), layers=read.maps(record)[:1], against=LOWER_RATES)  # fmt: skip


def seen_inputs(record: Record) -> Mapping[str, InputStatistics]:
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
    of = read.readings(began, path).values()
    rows = max((x.rows_seen - x.rows_without_gradient for x in of), default=0)
    share = common.value if common is not None and common.above(MOSTLY_MEAN) and rows > 1 else 0.0
    mean, std = rms.value * math.sqrt(share), rms.value * math.sqrt(max(0.0, 1 - share))
    features, nan = next(iter(read.readings(record, path).values())).features or 0, math.nan
    return {path: InputStatistics(mean, std, nan, nan, 0.0, nan, nan, features)}


def _is_read(record: Record, seen: InputStatistics) -> bool:
    """Return whether a layer may read an input as it is, beside others perhaps.

    A model may scale its inputs itself, or normalise them: then no layer has rows of their size, or
    of a size that is as far off. Without readings it is not known.
    """
    seen_by = (read.entries(record, path) for path in read.maps(record))
    sizes = [rows.value for rows in seen_by if rows is not None]
    rms = math.hypot(seen.mean, seen.std)
    alike = any(rms / READ_AS_IT_IS < size < READ_AS_IT_IS * rms for size in sizes)
    return not sizes or alike or (seen.std > LARGE_STD and max(sizes) > LARGE_STD) or (
        seen.std < SMALL_STD and min(sizes) < SMALL_STD)  # fmt: skip


def _long_rows(record: Record) -> float:
    """Return √(mean / median) of the rows' scale: how far a few long rows raise the rms."""
    for first in read.maps(record)[:1]:
        mean, middle = (read.typical(record, first, of) for of in ("scale_mean", "scale_p50"))
        if mean and middle and mean.value >= 0 and middle.value > 0:
            return max(1.0, math.sqrt(mean.value / middle.value))
    return 1.0


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
    for name, seen in seen_inputs(record).items():
        share = common_share(seen)
        if share > COMMON_SHARE_WATCH and _is_read(record, seen) and not centred:
            acts = share > COMMON_SHARE_ACT and _costs(record)
            yield Finding("input-mean", "act" if acts else "watch" if suffers(record) else "note",
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
    of = (*ENTRYWISE, "CrossEntropyLoss")
    chance, began = record.chance, [r for r in record.reports[:1] if r.loss_module in of]
    if chance is None and record.losses and began:  # its first loss, if the outputs begin small
        *_, outputs = (math.nan, *(x.activation_rms for x in began[0].layers.values()))
        least = min(record.losses[0], record.losses[-1])
        chance = least if (outputs or math.nan) ** 2 < least / 4 else None
    if chance is not None and chance > LARGE_TARGETS and not is_unbounded(record):
        faulty = suffers(record) or not all(map(math.isfinite, record.losses))
        smaller_steps = (Advice("learning rate × 0.1", "rate*0.1"),
                         Advice("use AdamW with learning rate 0.001", "adamw"))  # fmt: skip
        yield Finding("target-scale", "act" if faulty else "note",
            f"A model whose outputs are all zero has a loss of about {chance:.3g}: the targets "
            "are in large units, or the loss is a sum.",
            (Evidence("loss of a constant prediction", chance, LARGE_TARGETS, step=0),),
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
            (Evidence("scale_cv", spread.value, LENGTH_CV_WATCH, path, spread.since),),
            (_AFFINE_LIKE,
             Advice("look at the longest samples: they may be outliers")),
            "Neither one constant scale nor another learning rate makes the rows more alike.",
            layers=first, since=spread.since, against=RATES)  # fmt: skip


# Some graph networks, such as GIN, sum on purpose: it is told where the loss does not fall.
told(__name__, "row-spread", "", "act",
     "{place} sums up to {most:.0f} rows into one (the median: {middle:.0f}) and does not divide "
     "by their number, so that the length of a result follows it.",
     Number("rows that are summed into one", "most", above=MANY),
     Advice("divide by the number of neighbours, or by the root of both nodes' degrees, with each "
            "node its own neighbour (self-loops)"),
     unless=lambda record: not goes_badly(record))  # fmt: skip
