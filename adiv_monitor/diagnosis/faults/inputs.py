"""Are inputs, targets and rows of a scale that initialisations and learning rates expect?

The inputs' scale first, then their mean, the targets' scale, and the lengths of rows. What was not
observed of the inputs, the first layer's readings tell.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from adiv_monitor.diagnosis.course import is_unbounded, start
from adiv_monitor.diagnosis.faults.fault import LEARNING, act_if, fault
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.units import DEAD_ACT, dead_share
from adiv_monitor.diagnosis.finding import LOWER_RATES, RATES, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.readings import (
    Typical,
    by_layer,
    entering,
    entries,
    maps,
    readings,
    scale_free,
    typical,
)
from adiv_monitor.diagnosis.record import InputStatistics, Record

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
_AFFINE_LIKE = Advice(
    "use an affine-like layer as the first layer: it divides each row by its length", "affine-like"
)


@fault(
    "input-scale",
    "Inputs of an unsuitable scale",
    about="inputs",
    shown_by=entering,
    acts_below=1.0,
)
def input_scale(record: Record) -> Iterator[Finding]:
    """Find inputs, or features of them, far larger or smaller than initialisations assume."""
    first = maps(record)[:1]
    for name, seen in record.inputs.items():
        evidence = tuple(_scale_evidence(name, seen, _long_rows(record)))
        if evidence and _is_read(record, seen):
            large = seen.std / _long_rows(record) > LARGE_STD
            yield _scale_finding(first, act_if(_costs(record)), f"input {name!r}", evidence, large)
    if record.inputs or (found := entering(record)) is None:
        return
    path, rms = found
    length, common = typical(record, path, "scale_mean"), _mostly_mean(record, path)
    std = rms.value * (1 if common is None else math.sqrt(max(0.0, 1 - common.value)))
    large = std / _long_rows(record) > LARGE_STD
    short = length is not None and length.value < 1 + SHORT_ROW
    if large or (short and 0 < rms.value < SMALL_STD):
        far = large and rms.value > FAR_TOO_LARGE and not _is_normalised(record, path)
        limit = LARGE_STD if large else SMALL_STD
        yield _scale_finding((path,), act_if(far or suffers(record)), "the first layer",
            (Evidence("rms of the inputs", rms.value, limit, path),
             *([] if length is None else [Evidence("scale_mean", length.value, None, path)])),
            large)  # fmt: skip


def _is_read(record: Record, seen: InputStatistics) -> bool:
    """Return whether a layer may read an input as it is, beside others perhaps.

    A model may scale its inputs itself, or normalise them: then no layer has rows of their size, or
    of a size that is as far off. Without readings it is not known.
    """
    sizes = [rows.value for path in maps(record) if (rows := entries(record, path)) is not None]
    rms = math.hypot(seen.mean, seen.std)
    return (
        not sizes
        or any(rms / READ_AS_IT_IS < size < READ_AS_IT_IS * rms for size in sizes)
        or (seen.std > LARGE_STD and max(sizes) > LARGE_STD)
        or (seen.std < SMALL_STD and min(sizes) < SMALL_STD)
    )


def _long_rows(record: Record) -> float:
    """Return √(mean / median) of the rows' scale: how far a few long rows raise the rms."""
    seen = [typical(record, p, m) for p in maps(record)[:1] for m in ("scale_mean", "scale_p50")]
    mean, middle = (t.value if t is not None else math.nan for t in seen or (None, None))
    return max(1.0, math.sqrt(mean / middle)) if mean >= 0 and middle > 0 else 1.0


def _scale_finding(
    first: tuple[str, ...], strength: Strength, of: str, seen: tuple[Evidence, ...], large: bool
) -> Finding:
    said = " and ".join(f"{evidence.measure} {evidence.value:.3g}" for evidence in seen)
    return Finding("input-scale", strength,
        f"The entries of {of} have an unsuitable scale ({said}): initialisations and learning "
        "rates expect a standard deviation of about 1 in each feature.", seen,
        (Advice("standardise the inputs: subtract the mean of each feature (channel), and divide "
                "by its standard deviation", "standardise-inputs"),
         Advice("divide the inputs by one constant", "scale-inputs"), _AFFINE_LIKE),
        "A lower learning rate suits the first layer, and slows down all others." * large,
        layers=first, against=LOWER_RATES)  # fmt: skip


def _mostly_mean(record: Record, first: str) -> Typical | None:
    """Return the first layer's `common_share` if it is most of the rows' mean square, else None."""
    # Later, units may have died: the few rows that still get a gradient are alike.
    began = replace(record, reports=record.reports[:1])
    common = typical(began, first, "common_share")
    return common if common is not None and common.above(MOSTLY_MEAN) else None


def _is_normalised(record: Record, layer: str) -> bool:
    """Return whether the layer right behind holds the gain of a normalisation."""
    for report in record.reports:
        paths = list(report.layers)
        if layer in paths[:-1]:
            behind = paths[paths.index(layer) + 1]
            return readings(record, behind)[report.step].kind == "gain"
    return False


def _scale_evidence(name: str, seen: InputStatistics, long_rows: float) -> Iterator[Evidence]:
    if seen.std / long_rows > LARGE_STD:
        yield Evidence("input std", seen.std, LARGE_STD, name)
    elif 0 < seen.std < SMALL_STD and seen.std * seen.std * seen.features < SHORT_ROW:
        yield Evidence("input std", seen.std, SMALL_STD, name)
    if seen.feature_std_ratio > UNEVEN_FEATURES:
        yield Evidence("feature std ratio", seen.feature_std_ratio, UNEVEN_FEATURES, name)


def _costs(record: Record) -> bool:
    """Return whether the first layer trains badly, which makes an unusual input a fault.

    It does not if a normalisation right behind it removes the scale, or if the optimizer's step
    does not depend on the scale while the loss begins where it should and falls.
    """
    if any(_is_normalised(record, first) for first in maps(record)[:1]):
        return False
    known = record.chance is not None and bool(record.losses)
    bad_start = known and record.losses[0] > FAR_ABOVE_CHANCE * abs(start(record))
    harmed = bad_start or suffers(record) or dead_share(record) > DEAD_ACT
    return harmed or not scale_free(record.facts)


@fault("input-mean", "Inputs that are not centred", about="inputs", shown_by=entering)
def input_mean(record: Record) -> Iterator[Finding]:
    """Find inputs that are far from centred, so that all rows share one long common vector."""
    shares = by_layer(record, "common_share").values()
    # A model may centre inputs: then the rows of no layer share much of their length.
    centred = bool(shares) and all(share.value < COMMON_SHARE_WATCH for share in shares)
    for name, seen in record.inputs.items():
        share = common_share(seen)
        if share > COMMON_SHARE_WATCH and _is_read(record, seen) and not centred:
            # Which layer reads which of several inputs is not known.
            first = maps(record)[:1] if len(record.inputs) == 1 else ()
            harms = share > COMMON_SHARE_ACT and _costs(record)
            yield _mean_finding(first, act_if(harms), share, f"input {name!r}",
                Evidence("common share", share, COMMON_SHARE_WATCH, name))  # fmt: skip
    if not record.inputs and (found := entering(record)) is not None:
        path, _ = found
        if (common := _mostly_mean(record, path)) is not None:
            yield _mean_finding((path,), act_if(suffers(record)), common.value,
                "the first layer's inputs",
                Evidence("common_share", common.value, MOSTLY_MEAN, path))  # fmt: skip


def _mean_finding(
    first: tuple[str, ...], strength: Strength, share: float, of: str, evidence: Evidence
) -> Finding:
    return Finding("input-mean", strength,
        f"{share:.0%} of the mean square of {of} is due to the mean, which all samples share: each "
        "step moves all samples in the same direction.", (evidence,),
        (Advice("subtract the mean of each feature (channel)", "centre-inputs"),
         Advice("standardise the inputs", "standardise-inputs")),
        "Dividing by a constant or by each row's length does not remove the mean.",
        layers=first, against=("scale-inputs", "affine-like", "norm-like"))  # fmt: skip


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
        smaller_steps = (
            Advice("learning rate × 0.1", "rate*0.1"),
            Advice("use AdamW with learning rate 0.001", "adamw"),
        )
        yield Finding("target-scale", "act" if faulty else "note",
            f"A model whose outputs are all zero has a loss of {record.chance:.3g}: the targets "
            "are in large units, or the loss is a sum.",
            (Evidence("loss of a constant prediction", record.chance, LARGE_TARGETS, step=0),),
            (Advice("standardise the targets, or use the mean of the loss instead of its sum"),
             *(() if scale_free(record.facts) else smaller_steps)),
            "Clipping the gradient's norm makes all steps equally long.",
            against=("clip",))  # fmt: skip


@fault("row-spread", "Rows of very different length", about="inputs", shown_by=maps)
def row_spread(record: Record) -> Iterator[Finding]:
    """Find rows of very different length, of which the long ones determine the step."""
    first = maps(record)[:1]
    spread = typical(record, first[0], "scale_cv") if first else None
    lengths = [seen.length_cv for seen in record.inputs.values()]
    if spread is None and lengths:
        spread = Typical(max(lengths), 0.0)
    if spread is None or not spread.above(LENGTH_CV_WATCH):
        return
    far = spread.above(LENGTH_CV_ACT)
    yield Finding("row-spread", "act" if far else "watch" if suffers(record) else "note",
        f"The standard deviation of the row scale ‖φ‖² is {spread.value:.3g} times its mean"
        + ": a few long rows determine each step, and the others hardly count" * far + ".",
        (Evidence("scale_cv", spread.value, LENGTH_CV_WATCH, next(iter(first), None), spread.since),
         *(Evidence("length_cv of inputs", cv) for cv in lengths)),
        (_AFFINE_LIKE,
         Advice("look at the longest samples: they may be outliers"),
         Advice("use a norm-like layer as the first layer", "norm-like")),
        "Neither one constant scale nor another learning rate makes the rows more alike.",
        layers=first, since=spread.since,
        against=("scale-inputs", *RATES))  # fmt: skip
