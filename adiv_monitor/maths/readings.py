"""The measures of each layer, with standard errors, from the numbers on the host.

All layers are measured together, in arrays (layers,) or (layers, rows): one operation for all of
them costs little more than for one. What a layer does not have is NaN.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from adiv_monitor.maths.sums import (
    REALISED,
    Array,
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
_ALL = pairs_of((OWN, E, G, D, BIAS, Z, REST))
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


@np.errstate(all="ignore")  # what a layer does not have is NaN
def measure(layers: Mapping[str, Judged]) -> dict[str, LayerMeasures]:
    """Return all measures by layer."""
    alike: dict[object, list[str]] = defaultdict(list)
    for path, judged in layers.items():
        alike[_kind(judged.layer)].append(path)
    found: dict[str, LayerMeasures] = {}
    for paths in alike.values():
        found |= zip(paths, _measure([layers[path] for path in paths]), strict=True)
    return {path: found[path] for path in layers}


def _kind(layer: LayerSums[Array]) -> object:
    """Return a key that is equal for layers with similarly many rows in steps of the same kind."""
    moved = layer.realised
    has_update, has_applied = layer.dots.w_w is not None, layer.dots.a_w is not None
    knows_loss = moved is not None and not _is_without_loss(moved)
    rows = max(layer.sampled.seen, _FILLED).bit_length()
    return rows, D in layer.vectors, has_update, has_applied, moved is None, knows_loss


def _filled(arrays: Sequence[Array | Index | None], fill: float = np.nan) -> Array:
    """Stack arrays; fill up those that are shorter, or None."""
    lengths = [0 if array is None else len(array) for array in arrays]
    rest = next((array.shape[1:] for array in arrays if array is not None), ())
    stacked = np.full((len(arrays), max(lengths), *rest), fill)
    for line, array, length in zip(stacked, arrays, lengths, strict=True):
        if array is not None:
            line[:length] = array
    return stacked


class _Layers:
    """Layers in arrays (layers, …)."""

    def __init__(self, judged: Sequence[Judged]) -> None:
        layers = self.layers = [x.layer for x in judged]
        self._products = _filled([_products(x) for x in layers], fill=0.0)
        rows = self._products.shape[1]
        blocks, common = [x.blocks for x in layers], [x.common for x in layers]
        totals = [x.totals for x in layers]
        scales = [x.scales if x else None for x in totals]

        def of_rows(values: Sequence[Array | None]) -> PerRow:
            found = _filled(values)
            return np.pad(found, ((0, 0), (0, rows - found.shape[1])), constant_values=np.nan)

        def of(values: Sequence[Array | None]) -> PerLayer:
            return np.array([math.nan if x is None else float(x.reshape(-1)[0]) for x in values])

        self.scale = of_rows([x.scale for x in layers])
        self.has_scale = np.array([x.scale is not None for x in layers])
        self.has_blocks = np.array([x is not None for x in blocks])
        self.pivot = of([x.pivot if x and x.pivot.size else None for x in blocks])
        self.sums = of_rows([x.sums if x else None for x in blocks])
        self.norms = of_rows([x.norms if x else None for x in blocks])
        self.largest = of_rows([x.largest if x else None for x in blocks])
        self.groups = np.array([float(x.groups) if x else 1.0 for x in blocks])
        self.common = of_rows([x.products if x else None for x in common])
        self.lengths = of_rows([x.norms if x else None for x in common])
        self.has_common = np.array([x is not None for x in common])
        self.bias_alone = np.array([x.about.bias_alone for x in layers])
        self.active = of([x.active if x else None for x in totals])
        self.all_G_G = of([x.G_G if x else None for x in totals])
        self.concentration = of([x.concentration if x else None for x in totals])
        self.all_own_G = of([x.own_G if x else None for x in totals])
        self.all_own_own = of([x.own_own if x else None for x in totals])
        self.scale_sum = of([x.sum if x else None for x in scales])
        self.deviation = of([x.deviation if x else None for x in scales])
        self.scale_max = of([x.largest if x else None for x in scales])
        self.has_scales = np.array([x is not None for x in scales])
        self.attainable = of([x.attainable for x in layers])
        self.has_attainable = np.array([x.attainable is not None for x in layers])
        self.moved = [x.realised for x in layers if x.realised is not None]
        names = ("gamma_gamma", "w_w", "w_gamma", "a_a", "a_w", "a_gamma")
        every = [[getattr(x.dots, name) for name in names] for x in layers]
        self.dots = dict(zip(names, np.array(every, dtype=np.float64).T, strict=True))
        self.own_gamma = np.array([x.own_gamma for x in judged])
        self.own_w = np.array([x.own_w for x in judged])
        factor = np.array([factor_of(x) for x in layers])
        self.unit = np.where(np.isnan(factor), 1.0, factor)
        self.known_unit = ~np.isnan(factor)
        total = np.array([float(x.sampled.total) for x in layers])
        seen = np.array([float(x.sampled.seen) for x in layers])
        self.sample = Sample(total, self.per_row(G, G) != 0, seen if seen.min() < rows else None)
        expected = np.array([x.exact for x in judged])
        self.tolerance = np.array([x.evidence.tolerance for x in layers])
        G_G, whole = over_rows(self.per_row(G, G), self.sample), self.G_G
        e_G = over_rows(self.per_row(E, G), self.sample)
        verified = np.array([x.is_checked for x in judged])
        self.holds_more = (expected & ~verified) & measures.holds_more(
            by_ratio(e_G, G_G, whole, self.sample),
            self.own_gamma,
            over_rows(np.abs(self.per_row(E, G)), self.sample).total,
            self.tolerance,
            self.sample,
        )
        self.holds_more &= np.isnan(whole) | measures.represents(G_G.total, whole)
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
    def is_finite(self) -> Mask:
        """Whether all sums of squares of a layer are finite; False if their sum overflows.

        The products contain the square of the rest of e, of which the scales are a part.
        """
        total = self._products.sum((1, 2)) + self.dots["gamma_gamma"]
        for values, known in (
            (self.dots["w_w"], [x.dots.w_w is not None for x in self.layers]),
            (self.dots["a_a"], [x.dots.a_a is not None for x in self.layers]),
            (self.all_G_G, [x.totals is not None for x in self.layers]),
            (self.scale_sum, self.has_scales),
        ):
            total = total + np.where(known, values, 0.0)
        found: Mask = np.isfinite(total)
        return found

    def per_row(self, a: Vector, b: Vector) -> PerRow:
        """Return a_r·b_r of the sampled rows; 0 for zero-gradient rows."""
        found: PerRow = self._products[:, :, column_of(_ALL, a, b)]
        return found if a == b == G else np.where(self.sample.active, found, 0.0)

    def sum(self, a: Vector, b: Vector, exact: PerLayer | None = None) -> Sum:
        """Return ⟨a, b⟩ over all rows: `exact` where `self.exact` allows it, else estimated."""
        known = None if exact is None else np.where(self.exact, exact, np.nan)
        rows = self.per_row(a, b)
        if a == b and a in _GROWING:
            return self.growing(rows)
        return over_rows(rows, self.sample, known)

    def growing(self, rows: PerRow) -> Sum:
        """Return the sum over all rows of values that grow with ‖φ_r‖²: by size if it is known."""
        return by_size(over_rows(rows, self.sample), rows, self.sizes, self.sample)

    @cached_property
    def sizes(self) -> Sizes:
        """‖φ_r‖² of the rows; the sums are NaN where no pass over all rows determined them."""
        rows = np.where(self.sample.active & self.has_scale[:, None], self.scale, 0.0)
        total = np.where(self.has_scale, self.scale_sum, np.nan)
        return Sizes(rows, total, self.deviation**2 + total**2 / self.active)

    def growing_with_gradients(self, rows: PerRow, whole: PerLayer) -> Sum:
        """Return the sum over all rows of values that grow with ‖g_r‖²; exact if `whole` is set."""
        exact = self.in_units(whole)
        total = np.where(np.isnan(exact), self.G_G, np.nan)
        sizes = Sizes(self.per_row(G, G), total, self.concentration * total**2)
        return by_size(over_rows(rows, self.sample, exact), rows, sizes, self.sample)

    @cached_property
    def G_G(self) -> PerLayer:
        """‖G‖² of all rows; NaN if there was no pass over all rows."""
        return self.in_units(self.all_G_G)

    def in_units(self, found: PerLayer) -> PerLayer:
        """Return a result that scales with ‖G‖² in the units of the optimizer's gradient."""
        whole: PerLayer = found * self.unit**2
        return whole


def _products(layer: LayerSums[Array]) -> Array:
    """Return the dot products of all pairs; 0 for those with vectors that the layer lacks."""
    pairs = pairs_of(layer.vectors)
    if pairs == _ALL:
        return layer.products
    found = np.zeros((len(layer.products), len(_ALL)))
    found[:, [column_of(_ALL, *pair) for pair in pairs]] = layer.products
    return found


Found = dict[str, tuple[Estimate, Mask | None]]  # a mask tells which layers have the measure


def _measure(layers: Sequence[Judged]) -> list[LayerMeasures]:
    x = _Layers(layers)
    G_G = x.sum(G, G, x.G_G)
    # Both sides of a ratio must have the same source: the parameters or the rows.
    e_G, e_e = x.sum(E, G, x.own_gamma), x.sum(E, E)
    found: Found = {
        "idle_share": (measures.idle_share(x.sample, x.active), None),
        "gradient_cosine": (measures.gradient_cosine(e_G, e_e, G_G, x.sample), None),
        "common_share": (_common_share(x), x.has_common),
        "attainable_cosine": (_certain(x.attainable), x.has_attainable),
        **_of_scales(x),
    }
    has_scale = x.has_scale | x.has_blocks
    distributions = {"scale": (*_of_entries(x), has_scale)}
    if D in x.layers[0].vectors:
        found |= {name: (of, None) for name, of in _of_update(x, G_G).items()}
        cosines = measures.row_cosines(x.per_row(D, G), x.per_row(D, D), x.per_row(G, G))
        mean = measures.row_cosine_mean(cosines, x.sample, x.tolerance)
        found["row_cosine_mean"] = mean, None
        if x.moved:
            found |= {name: (of, None) for name, of in _of_realised(x.moved).items()}
        share = x.sample.share_of(~np.isnan(cosines))
        of_rows = quantiles(cosines, LEVELS, share, Ends(-1, 1), x.tolerance)
        distributions["row_cosine"] = (*of_rows, np.ones_like(has_scale))
    found |= {name: (_certain(value), None) for name, value in _of_parameters(x).items()}
    for name, (values, errors, known) in distributions.items():
        for i, suffix in enumerate(_PERCENTILES, start=len(QUANTILE_LEVELS)):
            found[f"{name}_{suffix}"] = Estimate(values[:, i], errors[:, i]), known
    return _each(x, found, distributions)


def _each(
    x: _Layers, found: Found, distributions: Mapping[str, tuple[Array, Array, Mask]]
) -> list[LayerMeasures]:
    """Split the measures of all layers into one record per layer."""
    n, all_of_them = len(QUANTILE_LEVELS), np.ones(len(x.layers), dtype=bool)
    values = np.array([of.value for of, _ in found.values()]).T.tolist()
    errors = np.array([of.error for of, _ in found.values()]).T.tolist()
    masks = [all_of_them if mask is None else mask for _, mask in found.values()]
    known = np.array(masks).T.tolist()
    levels = []
    for of, _, mask in distributions.values():
        lines = zip(of[:, :n].tolist(), mask.tolist(), strict=True)
        levels.append([tuple(line) if has else () for line, has in lines])
    flags = (x.idle_seen, x.suspected, x.holds_more, x.is_finite)
    return [
        LayerMeasures(
            {name: v for name, v, has in zip(found, of_layer, theirs, strict=True) if has},
            {name: e for name, e, has in zip(found, errors_of, theirs, strict=True) if has and e},
            {name: line for name, line in zip(distributions, at, strict=True) if line},
            *rest,
        )
        for of_layer, errors_of, theirs, at, *rest in zip(
            *(values, errors, known, zip(*levels, strict=True)),
            *(flag.tolist() for flag in flags),
            strict=True,
        )
    ]


def _certain(value: PerLayer) -> Estimate:
    return Estimate(value, np.zeros_like(value))


def _chosen(known: Mask, one: Estimate, other: Estimate) -> Estimate:
    """Return one estimate where it is known, else the other."""
    return Estimate(*(np.where(known, a, b) for a, b in zip(one, other, strict=True)))


def _of_update(x: _Layers, G_G: Sum) -> dict[str, Estimate]:
    d_d = x.sum(D, D)
    d_G = x.sum(D, G, x.own_w)
    by_bias = np.where(x.bias_alone[:, None], x.per_row(D, D), x.per_row(BIAS, BIAS))
    of_bias = over_rows(by_bias, x.sample)
    squares = x.per_row(D, D) - 2 * x.per_row(D, BIAS) + x.per_row(BIAS, BIAS)
    of_weight = x.growing(np.where(x.bias_alone[:, None], 0.0, np.maximum(squares, 0.0)))
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


def _of_scales(x: _Layers) -> Found:
    scale = np.where(x.sample.active & x.has_scale[:, None], x.scale, 0.0)
    has_one = x.has_scale[:, None]
    own_G = np.where(has_one, scale * x.per_row(G, G), x.per_row(OWN, G))
    own_own = np.where(has_one, scale**2 * x.per_row(G, G), x.per_row(OWN, OWN))
    of_G = x.growing_with_gradients(own_G, x.all_own_G)
    of_own = x.growing_with_gradients(own_own, x.all_own_own)
    # These sums are over the rows' own gradients, whatever else the parameters' gradient holds.
    all_G = over_rows(x.per_row(G, G), x.sample, x.G_G)
    ratio = measures.interference_ratio(x.sum(REST, REST), of_own, x.sample)
    found = {
        "diagonal_cosine": measures.diagonal_cosine(of_G, of_own, all_G, x.sample),
        "interference_ratio": Estimate(np.where(x.known_unit, ratio.value, np.nan), ratio.error),
        **_of_all_scales(x),
    }
    known = x.has_scale | x.has_blocks
    return {name: (of, known) for name, of in found.items()}


def _of_all_scales(x: _Layers) -> dict[str, Estimate]:
    """Return the scales' mean, spread and maximum, from a pass over all rows or the sample."""
    groups, has_one, count = x.groups[:, None], x.has_scale[:, None], x.active
    pivot = np.where(x.has_scale, x.scale[:, 0] if x.scale.size else 0.0, np.nan_to_num(x.pivot))
    shifted = np.where(has_one, x.scale - pivot[:, None], x.sums)
    squares = np.where(has_one, shifted**2, x.norms**2)
    largest = np.where(has_one, x.scale, x.largest)
    active = x.sample.active
    means = (pivot[:, None] + shifted / groups) * groups
    count_of_active = over_rows(active * groups, x.sample)
    sum_of_active = over_rows(np.where(active, means, 0.0), x.sample)
    of_rows = {
        "scale_mean": measures.scale_mean(sum_of_active, count_of_active, x.sample),
        "scale_cv": measures.scale_cv_of_rows(shifted, squares, x.groups, pivot, x.sample),
        "scale_max": measures.scale_max_of_rows(largest, x.sample),
    }
    of_all = {
        "scale_mean": x.scale_sum / count,
        "scale_cv": measures.scale_cv(x.deviation**2, x.scale_sum, count),
        "scale_max": np.where(count > 0, x.scale_max, np.nan),
    }
    return {n: _chosen(x.has_scales, _certain(of_all[n]), of_rows[n]) for n in of_rows}


def _of_entries(x: _Layers) -> tuple[Array, Array]:
    """Return quantiles of the scales, bounded by 0 and by what a pass over all rows implies."""
    every, looked_at = [], []
    for layer, active, scale in zip(x.layers, x.sample.active, x.scale, strict=True):
        if layer.totals is not None and layer.totals.scales is not None:
            entries = layer.totals.scales.entries
            looked_at.append(len(entries))
        elif (blocks := layer.blocks) is not None:
            rows = blocks.rows_of_entries(layer.sampled.seen)
            entries = np.where(active[rows], blocks.entries, np.nan)
            looked_at.append(len(rows))
        else:
            entries = np.where(active, scale, np.nan)
            looked_at.append(layer.sampled.seen)
        every.append(entries)
    entries, seen = _filled(every), np.array(looked_at, dtype=np.float64)
    counted = (~np.isnan(entries)).sum(1)
    # Entries of one row may be equal, so they count as one; not all entries of the rows are here.
    some = variance_share(seen, x.sample.seen * x.groups, counted)
    some = some + x.sample.share_of(x.sample.active)
    share = np.where(x.has_scales, variance_share(seen, x.sample.total, counted), some)
    mean = np.nansum(entries, axis=1) / counted
    # Chebyshev's inequality bounds how far a share of the rows lies from the mean.
    levels, of_all = np.asarray(LEVELS), (x.scale_sum / x.active)[:, None]
    off = (x.deviation**2 / x.active)[:, None]
    low = np.maximum(of_all - np.sqrt(off / levels), 0.0)
    high = np.minimum(of_all + np.sqrt(off / (1 - levels)), x.scale_max[:, None])
    known = x.has_scales[:, None]
    low, high = np.where(known, low, 0.0), np.where(known, high, np.nan)
    alone = x.bias_alone[:, None]
    ends = Ends(*(np.where(alone, mean[:, None], end) for end in (low, high)))
    return quantiles(entries, LEVELS, share, ends, x.tolerance * np.abs(mean))


def _common_share(x: _Layers) -> Estimate:
    estimated = over_rows(x.sample.active.astype(np.float64), x.sample).total
    count = np.where(np.isnan(x.active), estimated, x.active)
    return measures.common_share(x.common, x.lengths**2, count, x.sample)


def _of_parameters(x: _Layers) -> dict[str, PerLayer]:
    first, dots = x.layers[0].dots, x.dots
    if first.w_w is None or first.w_gamma is None:
        return {}
    # w = −u, and a has the opposite sign of the applied update as well.
    w_w, gamma_gamma = dots["w_w"], dots["gamma_gamma"]
    found = {"parameter_cosine": measures.parameter_cosine(-dots["w_gamma"], w_w, gamma_gamma)}
    if first.a_w is not None:
        a_a = dots["a_a"]
        found["projection_cosine"] = measures.projection_cosine(dots["a_w"], a_a, w_w)
        found["applied_cosine"] = measures.applied_cosine(-dots["a_gamma"], a_a, gamma_gamma)
    return found
