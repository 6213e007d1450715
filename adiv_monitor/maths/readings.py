"""The measures of each layer, with standard errors, from the numbers on the host.

Layers whose records have the same structure are measured together: one operation for all of them
costs little more than for one.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from adiv_monitor.features.rows import Index
from adiv_monitor.maths import measures
from adiv_monitor.maths.estimates import (
    Ends,
    Estimate,
    Mask,
    PerLayer,
    PerRow,
    Sample,
    Sizes,
    Sum,
    by_ratio,
    by_size,
    over_rows,
    quantiles,
    variance_share,
)
from adiv_monitor.maths.records import R, joined, present
from adiv_monitor.maths.sums import (
    REALISED,
    Array,
    Dots,
    LayerSums,
    Moved,
    Vector,
    column_of,
    factor_of,
    pairs_of,
)
from adiv_monitor.report import QUANTILE_LEVELS

# The quantile levels: those of histograms, and p05, p50, p95.
_PERCENTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
LEVELS = (*QUANTILE_LEVELS, *_PERCENTILES.values())
OWN, E, G, D, BIAS, Z, REST, MOVED, BEYOND = Vector
# Vectors that a weight makes of a row: their norms grow with the row's.
_GROWING = (D, E, REST, Z)
# Layers with at most this many rows are padded to one length; others to less than twice theirs.
_FILLED = 255


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A layer's record, and whether the parameters' dot products apply to its rows.

    Attributes:
        layer: the layer's record.
        exact: nothing contradicts γ = c·GᵀΦ with a known c, so that sums over the parameters are
            exact for the rows.
        is_checked: `exact` is the result of the check of gradients.
        own_gamma: ⟨γ, γ′⟩ with γ′ the layer's contribution to γ, which differs from γ where other
            layers use its parameters; NaN if unknown.
        own_w: ⟨w, γ′⟩; NaN if unknown.
    """

    layer: LayerSums[Array]
    exact: bool
    is_checked: bool = False
    own_gamma: float = math.nan
    own_w: float = math.nan


@dataclass(frozen=True)
class LayerMeasures:
    """The measures of one layer.

    Attributes:
        values: the measures by name.
        errors: standard errors of the measures that are not exact.
        quantiles: quantiles of `scale` and `row_cosine`, at `QUANTILE_LEVELS`.
        idle_seen: number of zero-gradient rows in the sample.
        suspected: γ seems to be more than c·GᵀΦ, beyond what sampling and rounding explain.
        holds_more: γ is more than c·GᵀΦ: the suspicion is confirmed.
        is_finite: no tensor of the layer holds NaN or inf.
    """

    values: dict[str, float]
    errors: dict[str, float]
    quantiles: dict[str, tuple[float, ...]]
    idle_seen: int
    suspected: bool
    holds_more: bool
    is_finite: bool


def measure(layers: Mapping[str, Judged]) -> dict[str, LayerMeasures]:
    """Return all measures by layer."""
    alike: dict[object, list[str]] = defaultdict(list)
    for path, judged in layers.items():
        alike[_kind(judged.layer)].append(path)
    found: dict[str, LayerMeasures] = {}
    for paths in alike.values():
        found |= zip(paths, _measure_alike([layers[path] for path in paths]), strict=True)
    return {path: found[path] for path in layers}


def _kind(layer: LayerSums[Array]) -> object:
    """Return a key that is equal for layers that can be measured together."""
    several, dots = (layer.totals, layer.blocks, layer.common), layer.dots
    single = layer.scale, layer.realised, layer.attainable, dots.w_w, dots.a_w
    return (
        max(layer.sampled.seen, _FILLED).bit_length(),
        layer.vectors,
        layer.about.bias_alone,
        *[record and present(record) for record in several],
        *[number is None for number in single],
        layer.realised is not None and _is_without_loss(layer.realised),
    )


def _filled(arrays: Sequence[Array | Index], fill: float = np.nan) -> Array:
    """Stack the arrays; pad those of different length with `fill`."""
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return np.array(arrays)
    longest = max(shape[0] for shape in shapes)
    stacked = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def _stacked(records: Sequence[R | None]) -> R | None:
    """Stack records of the same structure into one with arrays (layers, …); None if all are."""
    some = [record for record in records if record is not None]
    return joined(some, _filled) if some else None


class _StackedLayers:
    """Layers with records of the same structure, as arrays (layers, …)."""

    def __init__(self, judged: Sequence[Judged]) -> None:
        layers = self.layers = [x.layer for x in judged]
        first = layers[0]
        self.products = _filled([x.products for x in layers], fill=0.0)
        self.scale = _stacked([x.scale for x in layers])
        self.blocks = _stacked([x.blocks for x in layers])
        self.totals = _stacked([x.totals for x in layers])
        self.scales = None if self.totals is None else self.totals.scales
        self.common = _stacked([x.common for x in layers])
        self.moved = [x.realised for x in layers if x.realised is not None]
        self.attainable = _stacked([x.attainable for x in layers])
        self.dots = cast("Dots[PerLayer]", joined([x.dots for x in layers], np.array))
        self.groups = np.array(
            [1.0 if x.blocks is None else float(x.blocks.groups) for x in layers]
        )
        self.own_gamma = np.array([x.own_gamma for x in judged])
        self.own_w = np.array([x.own_w for x in judged])
        factor = np.array([factor_of(x) for x in layers])
        self.unit = np.where(np.isnan(factor), 1.0, factor)
        self.known_unit = ~np.isnan(factor)
        self._vectors = first.vectors
        total = np.array([float(x.sampled.total) for x in layers])
        seen = np.array([float(x.sampled.seen) for x in layers])
        is_filled = seen.min() < self.products.shape[1]
        self.sample = Sample(total, self.per_row(G, G) != 0, seen if is_filled else None)
        expected = np.array([x.exact for x in judged])
        self.tolerance = np.array([x.evidence.tolerance for x in layers])
        G_G, whole = over_rows(self.per_row(G, G), self.sample), self.G_G
        e_G = over_rows(self.per_row(E, G), self.sample)
        verified = np.array([x.is_checked for x in judged])
        self.holds_more = (expected & ~verified) & measures.holds_more(
            e_G if whole is None else by_ratio(e_G, G_G, whole, self.sample),
            self.own_gamma,
            over_rows(np.abs(self.per_row(E, G)), self.sample).total,
            self.tolerance,
            self.sample,
        )
        if whole is not None:
            self.holds_more &= measures.represents(G_G.total, whole)
        # All rows are certain, a sample is not.
        self.suspected = self.holds_more
        self.holds_more = self.suspected & (self.sample.variance_share == 0)
        self.exact = expected & ~self.suspected

    @property
    def idle_seen(self) -> Index:
        """Number of zero-gradient rows in the sample."""
        found: Index = self.sample.seen.astype(np.int64) - self.sample.active.sum(1)
        return found

    @property
    @np.errstate(all="ignore")
    def is_finite(self) -> Mask:
        """Whether all sums of squares of a layer are finite; False if their sum overflows.

        The products contain the square of the rest of e, of which the scales are a part.
        """
        total = self.products.sum((1, 2)) + self.dots.gamma_gamma
        for step in (self.dots.w_w, self.dots.a_a):
            total = total if step is None else total + step
        if self.totals is not None:
            total = total + self.whole(self.totals.G_G)
        if self.scales is not None:
            total = total + self.whole(self.scales.sum)
        found: Mask = np.isfinite(total)
        return found

    def has(self, *vectors: Vector) -> bool:
        return all(vector in self._vectors for vector in vectors)

    def per_row(self, a: Vector, b: Vector) -> PerRow:
        """Return a_r·b_r of the sampled rows; 0 for zero-gradient rows."""
        found: PerRow = self.products[:, :, column_of(pairs_of(self._vectors), a, b)]
        if a == b == G:
            return found
        return np.where(self.sample.active, found, 0.0)

    def sum(self, a: Vector, b: Vector, exact: PerLayer | None = None) -> Sum:
        """Return ⟨a, b⟩ over all rows: `exact` where `self.exact` allows it, else estimated."""
        known = None if exact is None else np.where(self.exact, exact, np.nan)
        rows = self.per_row(a, b)
        if a == b and a in _GROWING:
            return self.growing(rows)
        return over_rows(rows, self.sample, known)

    def growing(self, rows: PerRow) -> Sum:
        """Return the sum over all rows of values that grow with ‖φ_r‖²: by size if it is known."""
        found = over_rows(rows, self.sample)
        return found if self.sizes is None else by_size(found, rows, self.sizes, self.sample)

    @cached_property
    def sizes(self) -> Sizes | None:
        """‖φ_r‖² of the rows; None where no pass over all rows determined its sum."""
        if self.scale is None or self.scales is None:
            return None
        rows = np.where(self.sample.active, self.scale, 0.0)
        total = self.whole(self.scales.sum)
        with np.errstate(divide="ignore", invalid="ignore"):
            squares = self.whole(self.scales.deviation) ** 2 + total**2 / self.active
        return Sizes(rows, total, squares)

    def growing_with_gradients(self, rows: PerRow, whole: Array | None) -> Sum:
        """Return the sum over all rows of values that grow with ‖g_r‖²; exact if `whole` is set."""
        if whole is not None:
            return over_rows(rows, self.sample, self.in_units(whole))
        found = over_rows(rows, self.sample)
        if self.totals is None or self.totals.concentration is None:
            return found
        total = self.in_units(self.totals.G_G)
        squares = self.whole(self.totals.concentration) * total**2
        return by_size(found, rows, Sizes(self.per_row(G, G), total, squares), self.sample)

    @cached_property
    def active(self) -> PerLayer:
        """Number of active rows among all; NaN where it is known from the sample only."""
        if self.totals is None:
            return np.full(len(self.layers), np.nan)
        return self.whole(self.totals.active)

    @cached_property
    def G_G(self) -> PerLayer | None:
        """‖G‖² of all rows; None if there was no pass over all rows."""
        return None if self.totals is None else self.in_units(self.totals.G_G)

    def whole(self, found: Array) -> PerLayer:
        """Return a result of the pass over all rows, one number per layer, as (layers,)."""
        return found.reshape(len(self.layers))

    def in_units(self, found: Array) -> PerLayer:
        """Return a result that scales with ‖G‖² in the units of the optimizer's gradient."""
        whole: PerLayer = self.whole(found) * self.unit**2
        return whole


def _measure_alike(layers: Sequence[Judged]) -> list[LayerMeasures]:
    x = _StackedLayers(layers)
    G_G = x.sum(G, G, x.G_G)
    found: dict[str, Estimate] = {"idle_share": measures.idle_share(x.sample, x.active)}
    # Both sides of a ratio must have the same source: the parameters or the rows.
    e_G, e_e = x.sum(E, G, x.own_gamma), x.sum(E, E)
    found["gradient_cosine"] = measures.gradient_cosine(e_G, e_e, G_G, x.sample)
    if x.has(REST):
        found |= _of_scales(x)
    distributions = _scale_distribution(x)
    if x.has(D):
        found |= _of_update(x, G_G)
        cosines = measures.row_cosines(x.per_row(D, G), x.per_row(D, D), x.per_row(G, G))
        found["row_cosine_mean"] = measures.row_cosine_mean(cosines, x.sample, x.tolerance)
        if x.moved:
            found |= _of_realised(x.moved)
        share = x.sample.share_of(~np.isnan(cosines))
        distributions["row_cosine"] = quantiles(cosines, LEVELS, share, Ends(-1, 1), x.tolerance)
    if (common := _common_share(x)) is not None:
        found["common_share"] = common
    if x.attainable is not None:
        found["attainable_cosine"] = _certain(x.attainable.reshape(-1))
    found |= {name: _certain(value) for name, value in _of_parameters(x).items()}
    for name, (values, errors) in distributions.items():
        for i, suffix in enumerate(_PERCENTILES, start=len(QUANTILE_LEVELS)):
            found[f"{name}_{suffix}"] = Estimate(values[:, i], errors[:, i])
    return _each(x, found, distributions)


def _each(
    x: _StackedLayers,
    found: Mapping[str, Estimate],
    distributions: Mapping[str, tuple[Array, Array]],
) -> list[LayerMeasures]:
    """Split the measures of all layers into one record per layer."""
    n = len(QUANTILE_LEVELS)
    values = np.array([estimate.value for estimate in found.values()]).T.tolist()
    errors = np.array([estimate.error for estimate in found.values()]).T.tolist()
    levels = [list(map(tuple, of[:, :n].tolist())) for of, _ in distributions.values()]
    flags = (x.idle_seen, x.suspected, x.holds_more, x.is_finite)
    return [
        LayerMeasures(
            dict(zip(found, of_layer, strict=True)),
            {name: error for name, error in zip(found, theirs, strict=True) if error},
            dict(zip(distributions, at, strict=True)),
            *rest,
        )
        for of_layer, theirs, at, *rest in zip(
            *(values, errors, zip(*levels, strict=True) if levels else [()] * len(values)),
            *(flag.tolist() for flag in flags),
            strict=True,
        )
    ]


def _certain(value: PerLayer) -> Estimate:
    return Estimate(value, np.zeros_like(value))


def _of_update(x: _StackedLayers, G_G: Sum) -> dict[str, Estimate]:
    d_d = x.sum(D, D)
    d_G = x.sum(D, G, x.own_w)
    if x.has(BIAS):
        of_bias = x.sum(BIAS, BIAS)
        squares = x.per_row(D, D) - 2 * x.per_row(D, BIAS) + x.per_row(BIAS, BIAS)
        of_weight = x.growing(np.maximum(squares, 0.0))
    else:
        nothing = Sum(np.zeros_like(d_d.total), np.zeros_like(d_d.spread))
        of_weight, of_bias = (nothing, d_d) if x.layers[0].about.bias_alone else (d_d, nothing)
    rate = measures.effective_lr(d_G, G_G, x.sample)
    # What γ holds besides these rows is part of the loss, too. If γ is not its gradient, `own_w` is
    # NaN, and the rows alone count.
    descent = measures.descent(over_rows(x.per_row(D, G), x.sample, x.own_w), x.sample)
    in_units = x.known_unit | ~np.isnan(x.own_w)
    return {
        "update_cosine": measures.update_cosine(d_G, d_d, G_G, x.sample),
        "effective_lr": Estimate(np.where(x.known_unit, rate.value, np.nan), rate.error),
        "harmed_fraction": measures.harmed_fraction(x.per_row(D, G), x.sample, d_d),
        "bias_share": measures.bias_share(of_weight, of_bias, x.sample),
        "update_ratio": measures.update_ratio(d_d, x.sum(Z, Z), x.sample),
        "descent": Estimate(np.where(in_units, descent.value, np.nan), descent.error),
    }


def _of_realised(moved: Sequence[Moved[Array]]) -> dict[str, Estimate]:
    products = _filled([x.products for x in moved], fill=0.0)
    seen = np.array([float(len(x.products)) for x in moved])
    active = products[:, :, column_of(REALISED, G, G)] != 0
    total = np.array([float(x.total) for x in moved])
    sample = Sample(total, active, seen if seen.min() < products.shape[1] else None)

    def summed(a: Vector, b: Vector) -> Sum:
        rows = products[:, :, column_of(REALISED, a, b)]
        return over_rows(np.where(active, rows, 0.0), sample)

    r_r, b_b, d_d = (summed(a, a) for a in (MOVED, BEYOND, D))
    found = {
        "single_layer_share": measures.single_layer_share(summed(MOVED, D), r_r, d_d, sample),
        "first_order_error": measures.first_order_error(b_b, r_r, sample),
    }
    if not _is_without_loss(moved[0]):
        r_G, G_G = summed(G, MOVED), summed(G, G)
        found["realised_cosine"] = measures.realised_cosine(r_G, r_r, G_G, sample)
    return found


def _is_without_loss(moved: Moved[Array]) -> bool:
    return bool(np.isnan(moved.products[:, column_of(REALISED, G, G)]).all())


def _of_scales(x: _StackedLayers) -> dict[str, Estimate]:
    if x.scale is not None:
        scale = np.where(x.sample.active, x.scale, 0.0)
        own_G, own_own = scale * x.per_row(G, G), scale**2 * x.per_row(G, G)
    else:
        own_G, own_own = x.per_row(OWN, G), x.per_row(OWN, OWN)
    of_G = x.growing_with_gradients(own_G, None if x.totals is None else x.totals.own_G)
    of_own = x.growing_with_gradients(own_own, None if x.totals is None else x.totals.own_own)
    # These sums are over the rows' own gradients, whatever else the parameters' gradient holds.
    all_G = over_rows(x.per_row(G, G), x.sample, x.G_G)
    ratio = measures.interference_ratio(x.sum(REST, REST), of_own, x.sample)
    return {
        "diagonal_cosine": measures.diagonal_cosine(of_G, of_own, all_G, x.sample),
        "interference_ratio": Estimate(np.where(x.known_unit, ratio.value, np.nan), ratio.error),
        **_of_all_scales(x),
    }


def _of_all_scales(x: _StackedLayers) -> dict[str, Estimate]:
    """Return the scales' mean, spread and maximum, from a pass over all rows or the sample."""
    groups = x.groups[:, None]
    if x.scales is not None:
        sums, count = x.whole(x.scales.sum), x.active
        deviation, largest = x.whole(x.scales.deviation), x.whole(x.scales.largest)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "scale_mean": _certain(sums / count),
                "scale_cv": _certain(measures.scale_cv(deviation**2, sums, count)),
                "scale_max": _certain(np.where(count > 0, largest, np.nan)),
            }
    pivot, shifted, squares, largest = _scales_of_rows(x)
    active = x.sample.active
    means = (pivot[:, None] + shifted / groups) * groups
    count_of_active = over_rows(active * groups, x.sample)
    sum_of_active = over_rows(np.where(active, means, 0.0), x.sample)
    return {
        "scale_mean": measures.scale_mean(sum_of_active, count_of_active, x.sample),
        "scale_cv": measures.scale_cv_of_rows(shifted, squares, x.groups, pivot, x.sample),
        "scale_max": measures.scale_max_of_rows(largest, x.sample),
    }


def _scales_of_rows(x: _StackedLayers) -> tuple[PerLayer, PerRow, PerRow, PerRow]:
    """Return a pivot, and of every row Σ (s − pivot), Σ (s − pivot)² over groups, and maximum."""
    if x.scale is not None:
        pivot = x.scale[:, 0] if x.scale.shape[1] else np.zeros(len(x.scale))
        shifted = x.scale - pivot[:, None]
        return pivot, shifted, shifted**2, x.scale
    assert x.blocks is not None
    pivot = x.blocks.pivot.reshape(len(x.layers), -1)
    return (
        pivot[:, 0] if pivot.shape[1] else np.zeros(len(pivot)),
        x.blocks.sums,
        x.blocks.norms**2,
        x.blocks.largest,
    )


def _scale_distribution(x: _StackedLayers) -> dict[str, tuple[Array, Array]]:
    if x.scales is not None:
        entries = x.scales.entries
        told = [t.scales for layer in x.layers if (t := layer.totals) is not None]
        looked_at = np.array([float(len(of.entries)) for of in told if of is not None])
        share = variance_share(looked_at, x.sample.total, (~np.isnan(entries)).sum(1))
        return {"scale": _of_entries(x, entries, share)}
    if x.scale is not None:
        entries = np.where(x.sample.active, x.scale, np.nan)
        some = x.sample.seen
    elif x.blocks is not None:
        of_rows = [
            b.rows_of_entries(layer.sampled.seen) for layer in x.layers if (b := layer.blocks)
        ]
        rows = _filled(of_rows, fill=0).astype(np.int64)
        active = np.take_along_axis(x.sample.active, rows, 1)
        entries = np.where(active, x.blocks.entries, np.nan)
        some = np.array([float(len(of_layer)) for of_layer in of_rows])
    else:
        return {}
    # Entries of one row may be equal, so they count as one; not all entries of the rows are here.
    share = variance_share(some, x.sample.seen * x.groups, (~np.isnan(entries)).sum(1))
    return {"scale": _of_entries(x, entries, share + x.sample.share_of(x.sample.active))}


def _of_entries(x: _StackedLayers, entries: Array, share: PerLayer) -> tuple[Array, Array]:
    """Return quantiles of the scales, bounded by 0 and by what a pass over all rows implies."""
    with np.errstate(invalid="ignore"):
        mean = np.nansum(entries, axis=1) / (~np.isnan(entries)).sum(1)
    if x.layers[0].about.bias_alone:
        ends = Ends(mean[:, None], mean[:, None])
    elif x.scales is None:
        ends = Ends(0.0, np.nan)
    else:
        levels, count = np.asarray(LEVELS), x.active
        with np.errstate(invalid="ignore", divide="ignore"):
            # Chebyshev's inequality bounds how far a share of the rows lies from the mean.
            of_all = (x.whole(x.scales.sum) / count)[:, None]
            off = (x.whole(x.scales.deviation) ** 2 / count)[:, None]
            low = np.maximum(of_all - np.sqrt(off / levels), 0.0)
            largest = x.whole(x.scales.largest)[:, None]
            high = np.minimum(of_all + np.sqrt(off / (1 - levels)), largest)
        ends = Ends(low, high)
    return quantiles(entries, LEVELS, share, ends, x.tolerance * np.abs(mean))


def _common_share(x: _StackedLayers) -> Estimate | None:
    if x.common is None:
        return None
    estimated = over_rows(x.sample.active.astype(np.float64), x.sample).total
    count = np.where(np.isnan(x.active), estimated, x.active)
    return measures.common_share(x.common.products, x.common.norms**2, count, x.sample)


def _of_parameters(x: _StackedLayers) -> dict[str, PerLayer]:
    dots, found = x.dots, {}
    if dots.w_w is None or dots.w_gamma is None:
        return {}
    # w = −u, and a has the opposite sign of the applied update as well.
    found["parameter_cosine"] = measures.parameter_cosine(-dots.w_gamma, dots.w_w, dots.gamma_gamma)
    if dots.a_w is not None and dots.a_a is not None and dots.a_gamma is not None:
        found["projection_cosine"] = measures.projection_cosine(dots.a_w, dots.a_a, dots.w_w)
        found["applied_cosine"] = measures.applied_cosine(-dots.a_gamma, dots.a_a, dots.gamma_gamma)
    return found
