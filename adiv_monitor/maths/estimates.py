"""From sampled rows to the layer: sums over all rows, what follows from them, and how sure that is.

A measure of a layer is over all its active rows; rows are sampled only to estimate it (spec, "From
sampled rows to the layer"). With R of T rows looked at, chosen evenly and none twice, a sum over
all rows is T/R times the sum over those. Every measure is a product of such sums with powers; the
error of each, relative to the sum, is known from the spread of the rows, and the delta method gives
what it does to the product: its standard error, and the bias of order 1/R, which is taken off.

Everything is float64 numpy on the host, of any number of layers at once: arrays are (layers,) or
(layers, rows). Idle rows, whose gradient is zero, count as rows that add nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

PerLayer = Float[np.ndarray, " layers"]
PerRow = Float[np.ndarray, "layers rows"]


class Estimate(NamedTuple):
    """A measure of every layer, and its standard error: 0 where it is exact."""

    value: PerLayer
    error: PerLayer


def variance_share(seen: PerLayer, total: PerLayer, counted: PerLayer | None = None) -> PerLayer:
    """(1 − R/T)/(n − 1): what is left of the rows' variance in the variance of their mean.

    0 when all rows were looked at, infinite for one row of several.

    Args:
        seen: R, rows looked at.
        total: T, rows.
        counted: n, those that the mean is over, such as the active ones; all seen if None.
    """
    rest = 1 - seen / np.maximum(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rest > 0, rest / ((seen if counted is None else counted) - 1), 0.0)


@dataclass(frozen=True)
class Sample:
    """How many of how many rows were looked at; which of those are active.

    Attributes:
        total: T, rows of every layer.
        active: (layers, rows), rows whose gradient is not zero.
        counts: R, rows looked at of every layer, if the arrays have more places than these; what
            stands in the others, which come last, counts nowhere.
    """

    total: PerLayer
    active: Bool[np.ndarray, "layers rows"]
    counts: PerLayer | None = None

    @cached_property
    def seen(self) -> PerLayer:
        """R, rows looked at of every layer."""
        if self.counts is not None:
            return self.counts
        return np.full(len(self.active), float(self.active.shape[1]))

    @cached_property
    def empty(self) -> Bool[np.ndarray, "layers rows"] | None:
        """Places of no row; None if there are none."""
        if self.counts is None:
            return None
        return np.arange(self.active.shape[1]) >= self.counts[:, None]

    def mean(self, rows: PerRow) -> PerLayer:
        """The mean over the rows looked at, of what is 0 in places of no row."""
        found: PerLayer = rows.sum(1) / np.maximum(self.seen, 1)
        return found

    @cached_property
    def active_seen(self) -> PerLayer:
        """Rows looked at that are active; infinite where all rows were looked at."""
        found: PerLayer = np.where(self.variance_share > 0, self.active.sum(1), np.inf)
        return found

    @cached_property
    def variance_share(self) -> PerLayer:
        """`variance_share` of these rows."""
        return variance_share(self.seen, self.total)

    def share_of(self, counted: Bool[np.ndarray, "layers rows"]) -> PerLayer:
        """The same of what is a mean over those rows alone."""
        return variance_share(self.seen, self.total, counted.sum(1))


@dataclass(frozen=True)
class Sum:
    """A sum over all rows of every layer.

    Attributes:
        total: its value; NaN where it is not exact and no active row was looked at.
        spread: what every sampled row's T-fold would add to it beyond the mean of these; 0 where
            the total is exact, NaN where one active row of several can't tell.
        doubt: how many times as much of its error every row brings as its spread says; None: once.
    """

    total: PerLayer
    spread: PerRow
    doubt: PerRow | None = None

    def as_error(self, spread: PerRow) -> PerRow:
        """A spread as large as errors are."""
        return spread if self.doubt is None else spread * self.doubt


def over_rows(rows: PerRow, sample: Sample, exact: PerLayer | None = None) -> Sum:
    """The sum over all rows: the exact one where it is given and a number, else from the rows."""
    scaled = rows * sample.total[:, None]
    with np.errstate(invalid="ignore"):
        mean = scaled.sum(1) / sample.seen
    spread = scaled - mean[:, None]
    if sample.empty is not None:
        spread[sample.empty] = 0.0
    spread[sample.active_seen < 2] = np.nan
    mean[sample.active_seen < 1] = np.nan
    if exact is None:
        return Sum(mean, spread)
    known = ~np.isnan(exact)
    return Sum(np.where(known, exact, mean), np.where(known[:, None], 0.0, spread))


def by_ratio(of: Sum, by: Sum, exact: PerLayer, sample: Sample) -> Sum:
    """A sampled sum told from how it goes with a positive one, whose exact value is known.

    `of.total · exact / by.total` (W. Cochran, Sampling Techniques, ch. 6), less its bias of order
    1/R: far more certain where few rows hold most of both, such as the rows that a loss still cares
    for. Its error is the jackknife's: how the ratio would change without a row, and so that of a
    row which holds much of `by` is more than what the ratio leaves of it. Where `exact` is NaN, or
    two active rows were not looked at, or all rows, the sum as it is.
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
    """How large rows are, by a measure that is known of all of them.

    Attributes:
        rows: of every sampled row; 0 of idle ones.
        total: their sum over all rows; NaN where that is unknown.
        squares: the sum of their squares over all rows.
    """

    rows: PerRow
    total: PerLayer
    squares: PerLayer


def by_size(of: Sum, values: PerRow, sizes: Sizes, sample: Sample) -> Sum:
    """A sampled sum of what grows with a row's size, as ‖d_r‖² with ‖φ_r‖²: `by_ratio` to that.

    Few rows may hold most of such a sum, and a sample that lacks them can't know. So its error is
    that of the sample or, if larger, that of the model v_r = r s_r (1 + τ ξ_r) with ξ_r of variance
    1, which counts the rows that were not looked at (R. Royall, On finite population sampling
    theory under certain linear regression models, 1970):

        τ² r² [(S/S_seen − 1)² Σ_seen s_r² + Σ_rest s_r²],   τ² = mean of (v_r/(r s_r) − 1)²

    Args:
        of: the sum.
        values: v_r of the sampled rows, 0 of idle ones.
        sizes: s_r.
        sample: the rows.
    """
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


def by_regression(of: Sum, by: Sum, exact: PerLayer) -> Sum:
    """A sampled sum of either sign, told from its rows' slope on those of a sum that is known.

    `of.total + β (exact − by.total)`, β the slope of least squares (W. Cochran, Sampling
    Techniques, ch. 7). Where `exact` is NaN, the sum as it is.
    """
    known = ~np.isnan(exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (of.spread * by.spread).sum(1) / (by.spread**2).sum(1)
    slope = np.where(known & np.isfinite(slope), slope, 0.0)
    missed = np.where(known, exact - by.total, 0.0)
    return Sum(of.total + slope * missed, of.spread - slope[:, None] * by.spread)


def product(numerator: Sum, factors: Sequence[tuple[Sum, float]], sample: Sample) -> Estimate:
    """N Π_j S_j^p_j, less its bias of order 1/R, with its standard error by the delta method.

    Args:
        numerator: N, of either sign, perhaps 0.
        factors: S_j, not negative, and their powers p_j.
        sample: the rows behind those of the sums that are not exact.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = sample.variance_share
        is_sampled = share.any()  # else every row was looked at
        rest = np.ones_like(numerator.total)
        relative = np.zeros_like(numerator.spread)  # Σ_j p_j δS_j/S_j of every row
        doubted = np.zeros_like(numerator.spread)  # the same, as far as errors go
        own = np.zeros_like(rest)  # Σ_j p_j mean((δS_j/S_j)²)
        for factor, power in factors:
            # A zero that is divided by has no direction, whatever the parameters say besides; a
            # sum that overflowed is not known.
            unknown = ((factor.total == 0) & (power < 0)) | np.isinf(factor.total)
            total = np.where(unknown, np.nan, factor.total)
            rest = rest * total**power
            if not is_sampled or not factor.spread.any():
                continue
            exact = factor.spread == 0
            deviation = np.where(exact, 0.0, factor.spread / factor.total[:, None])
            relative = relative + power * deviation
            doubted = doubted + power * factor.as_error(deviation)
            own = own + power * sample.mean(deviation**2)
        value = numerator.total * rest
        if not is_sampled:
            return Estimate(value, np.zeros_like(value))
        spread = numerator.as_error(numerator.spread)
        influence = by_chance(spread, rest[:, None]) + by_chance(doubted, value[:, None])
        bias = by_chance(sample.mean(numerator.spread * relative), rest)
        bias = bias + by_chance((sample.mean(relative**2) - own) / 2, value)
        bias = np.where(sample.active_seen < 2, 0.0, bias_by_chance(share, bias))
        squares = by_chance(sample.mean(influence**2), share)
        error = np.sqrt(np.where(share == 0, 0.0, squares))  # exact, however large they are
        # What is of order 1/R is less than what is of order 1/√R, or tells nothing; nor does it
        # turn the sign of what has one for certain.
        limit = np.where(np.isnan(error), np.inf, error)
        certain = ~numerator.spread.any(1)
        limit = np.where(certain, np.minimum(limit, np.abs(value) / 2), limit)
        return Estimate(value - np.clip(bias, -limit, limit), error)


def mean_of_active(rows: PerRow, counted: Bool[np.ndarray, "layers rows"], s: Sample) -> Estimate:
    """The mean over those rows that count; NaN where there are none."""
    ones = over_rows(counted.astype(np.float64), s)
    return product(over_rows(np.where(counted, rows, 0.0), s), [(ones, -1)], s)


def share_error(hits: PerLayer, rows: PerLayer, sample: Sample) -> PerLayer:
    """Standard error of a share of rows; none of few rows is not yet none of all.

    √(p(1 − p)) of p = (hits + 1)/(rows + 2), Laplace's rule, in place of the sample's own spread.
    """
    p = (hits + 1) / (rows + 2)
    spread = p * (1 - p) * sample.seen / np.maximum(rows, 1)
    error: PerLayer = np.sqrt(by_chance(sample.variance_share, spread))
    return error


class Ends(NamedTuple):
    """Between what the values of all rows lie; arrays are (layers, levels), NaN what is unknown."""

    least: np.ndarray | float
    most: np.ndarray | float


def quantiles(
    values: Float[np.ndarray, "layers entries"],
    levels: Sequence[float],
    share: PerLayer | float = 0.0,
    ends: Ends | None = None,
    rounding: PerLayer | float = 0.0,
) -> tuple[Float[np.ndarray, "layers levels"], Float[np.ndarray, "layers levels"]]:
    """Quantiles of the entries that are not NaN, with linear interpolation, and their errors.

    The error is half the distance of the quantiles one standard error of the level,
    √(p(1 − p) · share), to either side, or a quarter of the distance at two of them, whichever is
    more (Woodruff 1952): near an end few entries lie within one. Where the quantile sits among
    entries that are alike, it jumps from these to the next: the distance of the farther of those k
    errors away by k, the largest of k = 1, 2, 3. And n alike ones don't exclude that up to 3/n of
    all rows are others (rule of three): where that reaches the level, half the way to the end.
    NaN for one entry of several. All NaN without entries.

    Args:
        values: the entries; NaN counts as none.
        levels: 0 to 1.
        share: `Sample.variance_share`.
        ends: the least and the most that any row may have; None: of rows that were not seen nothing
            is to be reckoned with.
        rounding: how far apart entries may lie that are alike.
    """
    ordered = np.sort(values)  # NaN last
    counts = (ordered == ordered).sum(-1, keepdims=True)
    at = np.broadcast_to(np.asarray(levels, dtype=np.float64), (len(values), len(levels)))
    with np.errstate(invalid="ignore"):
        width = np.sqrt(at * (1 - at) * np.broadcast_to(share, len(values))[:, None])
    width = np.where(np.isfinite(width), width, 1.0)
    found = _interpolated(ordered, counts, at)
    if not width.any():  # every row was looked at
        return found, np.zeros_like(found)

    def to_sides(errors: int) -> tuple[np.ndarray, np.ndarray]:
        levels = (np.clip(at + side * width, 0, 1) for side in (-errors, errors))
        low, high = (_interpolated(ordered, counts, level) for level in levels)
        return _distance(low, found), _distance(found, high)

    (low1, high1), sides2, sides3 = map(to_sides, (1, 2, 3))
    error = np.maximum((low1 + high1) / 2, sum(sides2) / 4)
    alike = np.broadcast_to(rounding, len(values))[:, None]
    far = (np.maximum(*sides) / k for k, sides in enumerate(((low1, high1), sides2, sides3), 1))
    error = np.where(np.minimum(low1, high1) <= alike, np.maximum.reduce([error, *far]), error)
    if ends is not None:
        others = 3 * np.broadcast_to(share, len(values))[:, None]
        to_ends = np.where(at <= others, _distance(ends.least, found), 0.0)
        to_ends = np.maximum(to_ends, np.where(1 - at <= others, _distance(found, ends.most), 0.0))
        error = np.where((error <= alike) & (width > 0), np.maximum(error, to_ends / 2), error)
    alone = (counts == 1) & (width > 0)  # one row of several can't tell
    error = np.where(width == 0, 0.0, error)  # also of what is not finite, or is not there
    return found, np.where(alone, np.nan, error)


def _distance(low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
    """How far apart two values are; infinite ones of one sign are the same."""
    with np.errstate(invalid="ignore"):
        distance: np.ndarray = np.where(np.equal(high, low), 0.0, np.subtract(high, low))
    return distance


def _interpolated(
    ordered: Float[np.ndarray, "layers entries"],
    counts: Float[np.ndarray, "layers 1"],
    levels: Float[np.ndarray, "layers levels"],
) -> Float[np.ndarray, "layers levels"]:
    """Quantiles of the first so many entries."""
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
    """Their product; 0 where nothing was left to chance, whatever the other is."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.where(chance == 0, 0.0, chance * other)
    return found


def bias_by_chance(share: PerLayer, second: PerLayer) -> PerLayer:
    """Their product, the bias that terms of second order tell; 0 where one row can't tell it."""
    return by_chance(np.where(np.isfinite(share), share, 0.0), second)
