"""Estimates of a layer's measures, with standard errors, from sums over sampled rows.

A measure of a layer is over all its active rows; rows are sampled only to estimate it (spec, "From
sampled rows to the layer"). With R of T rows sampled, uniformly and without replacement, a sum over
all rows is T/R times the sum over the sample. Every measure is a product of powers of such sums.
The spread of the rows gives the relative error of each sum; the delta method turns these into the
product's standard error and its bias of order 1/R, which is subtracted.

Everything is float64 numpy on the host, for any number of layers at once: arrays are (layers,) or
(layers, rows). Zero-gradient rows count as rows that add nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

PerLayer = Float[np.ndarray, " layers"]
Mask = Bool[np.ndarray, " layers"]
PerRow = Float[np.ndarray, "layers rows"]


# By number of active rows n < 8: Student's t with n − 1 degrees of freedom that is exceeded as
# often as 3 by a normal variable, over 3.
_OF_FEW = (np.nan, np.nan, np.nan, 6.40, 3.07, 2.21, 1.84, 1.63)


class Estimate(NamedTuple):
    """A measure of every layer and its standard error, which is 0 where the measure is exact."""

    value: PerLayer
    error: PerLayer


def variance_share(seen: PerLayer, total: PerLayer, counted: PerLayer | None = None) -> PerLayer:
    """Return (1 − R/T)/(n − 1): the variance of the rows' mean relative to the rows' variance.

    0 when all rows were sampled, infinite for one row of several.

    Args:
        seen: R, number of sampled rows.
        total: T, number of all rows.
        counted: n, number of rows that the mean is over, such as the active ones; R if None.
    """
    rest = 1 - seen / np.maximum(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rest > 0, rest / ((seen if counted is None else counted) - 1), 0.0)


@dataclass(frozen=True)
class Sample:
    """The sampled rows of every layer: their number, the number of all rows, and the active ones.

    Attributes:
        total: T, number of rows of every layer.
        active: (layers, rows), whether a row's gradient is nonzero.
        counts: R, number of sampled rows of every layer, if the arrays are padded; the padding
            comes last and is ignored. None if they are not padded.
    """

    total: PerLayer
    active: Bool[np.ndarray, "layers rows"]
    counts: PerLayer | None = None

    @cached_property
    def seen(self) -> PerLayer:
        """R, number of sampled rows of every layer."""
        if self.counts is not None:
            return self.counts
        return np.full(len(self.active), float(self.active.shape[1]))

    @cached_property
    def empty(self) -> Bool[np.ndarray, "layers rows"]:
        """Entries that are padding."""
        return np.arange(self.active.shape[1]) >= self.seen[:, None]

    def mean(self, rows: PerRow) -> PerLayer:
        """Return the mean over the sampled rows of an array that is 0 in its padding."""
        found: PerLayer = rows.sum(1) / np.maximum(self.seen, 1)
        return found

    @cached_property
    def active_seen(self) -> PerLayer:
        """Number of sampled rows that are active; infinite where all rows were sampled."""
        found: PerLayer = np.where(self.variance_share > 0, self.active.sum(1), np.inf)
        return found

    def widened(self, error: PerLayer) -> PerLayer:
        """Return an error that rests on the spread of the active rows, wider where these are few.

        A few rows may be alike by chance. Student's t says how far off their mean then is: three of
        the returned errors hold it as often as three standard errors hold a normal variable. The
        error of fewer than three rows is NaN.
        """
        few = np.minimum(self.active_seen, len(_OF_FEW)).astype(np.int64)
        return by_chance(error, np.append(_OF_FEW, 1.0)[few])

    @cached_property
    def variance_share(self) -> PerLayer:
        """`variance_share` of these rows."""
        return variance_share(self.seen, self.total)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every row of every layer was sampled, so that nothing is estimated."""
        return not self.variance_share.any()

    def share_of(self, counted: Bool[np.ndarray, "layers rows"]) -> PerLayer:
        """Return the `variance_share` of a mean over the counted rows alone."""
        return variance_share(self.seen, self.total, counted.sum(1))


@dataclass(frozen=True)
class Sum:
    """A sum over all rows of every layer.

    Attributes:
        total: its value; NaN where it is not exact and no active row was sampled.
        spread: T times every sampled row, minus the mean of these; 0 where the total is given or
            every row of every layer was sampled, NaN where there is one active row of several.
        doubt: factor by which every row's contribution to the error exceeds its spread; None: 1.
    """

    total: PerLayer
    spread: PerRow
    doubt: PerRow | None = None

    def as_error(self, spread: PerRow) -> PerRow:
        """Return the spread times `doubt`, for use in errors."""
        return spread if self.doubt is None else spread * self.doubt


def over_rows(rows: PerRow, sample: Sample, exact: PerLayer | None = None) -> Sum:
    """Return the sum over all rows: `exact` where it is given and not NaN, else the estimate."""
    scaled = rows * sample.total[:, None]
    with np.errstate(invalid="ignore"):
        mean = scaled.sum(1) / sample.seen
        if sample.is_whole:
            known = mean if exact is None else np.where(np.isnan(exact), mean, exact)
            return Sum(known, np.zeros_like(rows))
        spread = scaled - mean[:, None]
    spread[sample.empty] = 0.0
    spread[sample.active_seen < 2] = np.nan
    mean[sample.active_seen < 1] = np.nan
    if exact is None:
        return Sum(mean, spread)
    known = ~np.isnan(exact)
    return Sum(np.where(known, exact, mean), np.where(known[:, None], 0.0, spread))


def by_ratio(of: Sum, by: Sum, exact: PerLayer, sample: Sample) -> Sum:
    """Estimate a sampled sum by its ratio to a positive sum whose exact value is known.

    `of.total · exact / by.total` (W. Cochran, Sampling Techniques, ch. 6), minus its bias of order
    1/R. This is far more precise where a few rows hold most of both sums, as when only a few rows
    still have a large gradient. The error is the jackknife's: the change of the ratio without a
    row, which exceeds the row's residual if the row holds much of `by`. The sum is returned
    unchanged where `exact` is NaN, fewer than two active rows were sampled, or all rows were.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = exact / by.total
        slope = of.total / by.total
        rest = of.spread - slope[:, None] * by.spread
        held = (1 + by.spread / by.total[:, None]) / sample.seen[:, None]  # of `by`
        doubt = np.where(held < 1, 1 / (1 - held), 1.0)
        share = sample.variance_share
        bias = -bias_by_chance(share, sample.mean(rest * by.spread) / by.total)
        error = np.sqrt(by_chance(share, sample.mean((doubt * rest) ** 2)))
        total = ratio * (of.total - np.clip(bias, -error, error))
    known = np.isfinite(ratio) & (share > 0) & (sample.active_seen >= 2)
    each = known[:, None]
    return Sum(
        np.where(known, total, of.total),
        np.where(each, ratio[:, None] * rest, of.spread),
        np.where(each, doubt, 1.0),
    )


class Sizes(NamedTuple):
    """Sizes of rows, by a quantity whose sum over all rows is known.

    Attributes:
        rows: size of every sampled row; 0 for zero-gradient rows.
        total: sum of the sizes over all rows; NaN where it is unknown.
        squares: sum of the squared sizes over all rows.
    """

    rows: PerRow
    total: PerLayer
    squares: PerLayer


def by_size(of: Sum, values: PerRow, sizes: Sizes, sample: Sample) -> Sum:
    """Estimate by `by_ratio` a sum of values that grow with a row's size, as ‖d_r‖² with ‖φ_r‖².

    A few rows may hold most of such a sum, and a sample without them cannot show it. Its error is
    therefore that of the sample or, if larger, that of the model v_r = r s_r (1 + τ ξ_r) with ξ_r
    of variance 1, which includes the rows that were not sampled (R. Royall, On finite population
    sampling theory under certain linear regression models, 1970):

        τ² r² [(S/S_seen − 1)² Σ_seen s_r² + Σ_rest s_r²],   τ² = mean of (v_r/(r s_r) − 1)²

    Args:
        of: the sum.
        values: v_r of the sampled rows, 0 for zero-gradient rows.
        sizes: s_r.
        sample: the sampled rows.
    """
    if sample.is_whole:
        return of
    found = by_ratio(of, over_rows(sizes.rows, sample), sizes.total, sample)
    with np.errstate(divide="ignore", invalid="ignore"):
        seen, squares = sizes.rows.sum(1), (sizes.rows**2).sum(1)
        ratio = values.sum(1) / seen
        apart = np.where(sizes.rows > 0, values / (ratio[:, None] * sizes.rows) - 1, 0.0)
        tau_squared = (apart**2).sum(1) / (sizes.rows > 0).sum(1)
        unseen = np.maximum(sizes.squares - squares, 0.0)
        modelled = tau_squared * ratio**2 * ((sizes.total / seen - 1) ** 2 * squares + unseen)
        sampled = sample.variance_share * sample.mean(found.as_error(found.spread) ** 2)
        more = np.sqrt(modelled / sampled)
    more = np.where(np.isfinite(more), np.maximum(more, 1.0), 1.0)
    return replace(found, doubt=found.as_error(np.ones_like(found.spread)) * more[:, None])


def product(numerator: Sum, factors: Sequence[tuple[Sum, float]], sample: Sample) -> Estimate:
    """Return N Π_j S_j^p_j minus its bias of order 1/R, with the delta method's standard error.

    Args:
        numerator: N, of either sign, perhaps 0.
        factors: S_j, not negative, and their powers p_j.
        sample: the sampled rows of the sums that are not exact.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.ones_like(numerator.total)
        for factor, power in factors:
            # A vector of length zero has no direction, even if the parameters give a nonzero
            # numerator; a sum that overflowed is unknown.
            unknown = ((factor.total == 0) & (power < 0)) | np.isinf(factor.total)
            rest = rest * np.where(unknown, np.nan, factor.total) ** power
        value = numerator.total * rest
        if sample.is_whole:
            return Estimate(value, np.zeros_like(value))
        share = sample.variance_share
        relative, doubted, own = _relative(factors, sample)
        spread = numerator.as_error(numerator.spread)
        influence = by_chance(spread, rest[:, None]) + by_chance(doubted, value[:, None])
        bias = by_chance(sample.mean(numerator.spread * relative), rest)
        bias = bias + by_chance((sample.mean(relative**2) - own) / 2, value)
        bias = np.where(sample.active_seen < 2, 0.0, bias_by_chance(share, bias))
        squares = by_chance(sample.mean(influence**2), share)
        error = np.sqrt(np.where(share == 0, 0.0, squares))  # 0 if exact, even after overflow
        # The bias, of order 1/R, must not exceed the error, of order 1/√R.
        limit = np.where(np.isnan(error), np.inf, error)
        return Estimate(value - np.clip(bias, -limit, limit), sample.widened(error))


def _relative(
    factors: Sequence[tuple[Sum, float]], sample: Sample
) -> tuple[PerRow, PerRow, PerLayer]:
    """Return Σ_j p_j δS_j/S_j of every row, then with `doubt`, and Σ_j p_j mean((δS_j/S_j)²)."""
    relative = doubted = np.zeros(sample.active.shape)
    own = np.zeros(len(relative))
    for factor, power in factors:
        exact = factor.spread == 0
        deviation = np.where(exact, 0.0, factor.spread / factor.total[:, None])
        relative = relative + power * deviation
        doubted = doubted + power * factor.as_error(deviation)
        own = own + power * sample.mean(deviation**2)
    return relative, doubted, own


def mean_of_active(rows: PerRow, counted: Bool[np.ndarray, "layers rows"], s: Sample) -> Estimate:
    """Return the mean over the counted rows; NaN where there are none."""
    ones = over_rows(counted.astype(np.float64), s)
    return product(over_rows(np.where(counted, rows, 0.0), s), [(ones, -1)], s)


def jackknifed(whole: PerLayer, without: PerRow, seen: PerLayer, sample: Sample) -> Estimate:
    """Return a measure of the active rows minus its bias of order 1/n, with its error (Tukey 1958).

    Args:
        whole: the measure of the n active rows of the sample.
        without: the measure without one row, for every active row.
        seen: the share of all rows that were sampled.
        sample: the sampled rows.
    """
    rows, n, rest = sample.active, sample.active.sum(1), 1 - seen
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.where(rows, without - whole[:, None], 0.0)
        mean = apart.sum(1) / n
        squares = np.where(rows, (apart - mean[:, None]) ** 2, 0.0).sum(1)
        variance = np.where(n > 2, squares * (n - 1) / n, np.nan)  # fewer tell no spread
        error = np.sqrt(by_chance(rest, variance))
        return Estimate(whole - bias_by_chance(rest, (n - 1) * mean), sample.widened(error))


def share_error(hits: PerLayer, rows: PerLayer, sample: Sample) -> PerLayer:
    """Return the standard error of a share of rows; it is not 0 if no sampled row is a hit.

    √(p(1 − p)) with p = (hits + 1)/(rows + 2), Laplace's rule, replaces the sample's own spread.
    """
    p = (hits + 1) / (rows + 2)
    spread = p * (1 - p) * sample.seen / np.maximum(rows, 1)
    error: PerLayer = np.sqrt(by_chance(sample.variance_share, spread))
    return error


class Ends(NamedTuple):
    """Bounds of the values of all rows; arrays are (layers, levels), NaN where unknown."""

    least: np.ndarray | float
    most: np.ndarray | float


def quantiles(
    values: Float[np.ndarray, "layers entries"],
    levels: Sequence[float],
    share: PerLayer | float = 0.0,
    ends: Ends | None = None,
    rounding: PerLayer | float = 0.0,
) -> tuple[Float[np.ndarray, "layers levels"], Float[np.ndarray, "layers levels"]]:
    """Return linearly interpolated quantiles of the entries that are not NaN, and their errors.

    The error is half the distance between the quantiles one standard error of the level,
    √(p(1 − p) · share), to either side, or a quarter of the distance at two standard errors,
    whichever is larger (Woodruff 1952): near an end few entries lie within one. A quantile among
    equal entries jumps from these to the next value. There the error is the distance to the farther
    of the two quantiles k standard errors away, divided by k, the largest for k = 1, 2, 3. And n
    entries do not exclude that up to 3/n of all rows lie beyond them (rule of three): where that
    reaches the level, the error is at least half the distance to the end. NaN for one entry of
    several. All NaN without entries.

    Args:
        values: the entries; NaN is ignored.
        levels: 0 to 1.
        share: `Sample.variance_share`.
        ends: bounds of the values of all rows; None: the rule of three is not applied.
        rounding: largest difference of entries that count as equal.
    """
    ordered = np.sort(values)  # NaN last
    counts = (ordered == ordered).sum(-1, keepdims=True)
    at = np.broadcast_to(np.asarray(levels, dtype=np.float64), (len(values), len(levels)))
    with np.errstate(invalid="ignore"):
        width = np.sqrt(at * (1 - at) * np.broadcast_to(share, len(values))[:, None])
    width = np.where(np.isfinite(width), width, 1.0)
    if not width.any():  # every row was sampled
        found = _interpolated(ordered, counts, at)
        return found, np.zeros_like(found)
    # One, two and three standard errors of the level to either side.
    apart = [np.clip(at + side * width, 0, 1) for side in (-1, 1, -2, 2, -3, 3)]
    every = _interpolated(ordered, counts, np.concatenate([at, *apart], axis=1))
    found, *others = np.split(every, 7, axis=1)
    pairs = zip(others[::2], others[1::2], strict=True)
    sides = [(_distance(low, found), _distance(found, high)) for low, high in pairs]
    (low1, high1), sides2, _ = sides
    error = np.maximum((low1 + high1) / 2, sum(sides2) / 4)
    alike = np.broadcast_to(rounding, len(values))[:, None]
    far = (np.maximum(*pair) / k for k, pair in enumerate(sides, 1))
    error = np.where(np.minimum(low1, high1) <= alike, np.maximum.reduce([error, *far]), error)
    if ends is not None:
        unseen = 3 * np.broadcast_to(share, len(values))[:, None]
        to_ends = np.where(at <= unseen, _distance(ends.least, found), 0.0)
        to_ends = np.maximum(to_ends, np.where(1 - at <= unseen, _distance(found, ends.most), 0.0))
        # Where no end is known, entries that differ tell more than nothing.
        known = np.where((error <= alike) | np.isfinite(to_ends), to_ends, 0.0)
        error = np.where(width > 0, np.maximum(error, known / 2), error)
    alone = (counts == 1) & (width > 0)  # one row of several has no spread
    error = np.where(width == 0, 0.0, error)  # also where the quantile is not finite
    return found, np.where(alone, np.nan, error)


def _distance(low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
    """Return high − low; 0 for two infinities of the same sign."""
    with np.errstate(invalid="ignore"):
        distance: np.ndarray = np.where(np.equal(high, low), 0.0, np.subtract(high, low))
    return distance


def _interpolated(
    ordered: Float[np.ndarray, "layers entries"],
    counts: Float[np.ndarray, "layers 1"],
    levels: Float[np.ndarray, "layers levels"],
) -> Float[np.ndarray, "layers levels"]:
    """Return quantiles of the first `counts` entries of every layer."""
    if ordered.shape[-1] == 0:
        return np.full(levels.shape, np.nan)
    last = np.maximum(counts - 1, 0)
    at = last * levels
    low = at.astype(np.int64)
    lower = np.take_along_axis(ordered, low, -1)
    upper = np.take_along_axis(ordered, np.minimum(low + 1, last), -1)
    weight = at - low
    with np.errstate(invalid="ignore"):  # infinities
        between = lower + weight * (upper - lower)
    found: np.ndarray = np.where((weight == 0) | (lower == upper), lower, between)
    return found


def by_chance(chance: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return `chance · other`; 0 where `chance` is 0, even if `other` is not finite."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.where(chance == 0, 0.0, chance * other)
    return found


def bias_by_chance(share: PerLayer, second: PerLayer) -> PerLayer:
    """Return `share · second`, the bias by the second-order terms; 0 where `share` is infinite."""
    return by_chance(np.where(np.isfinite(share), share, 0.0), second)
