"""From numbers on the host to the measures of each layer, with their standard errors.

Layers that were looked at alike, with as many rows, are measured together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from adiv_monitor.features.rows import Index
from adiv_monitor.maths import measures
from adiv_monitor.maths.alike import Fail, of_alike, raised
from adiv_monitor.maths.estimates import (
    Ends,
    Estimate,
    PerLayer,
    PerRow,
    Sample,
    Sizes,
    Sum,
    by_ratio,
    by_regression,
    by_size,
    over_rows,
    quantiles,
    variance_share,
)
from adiv_monitor.report import QUANTILE_LEVELS

Array = np.ndarray[Any, np.dtype[np.float64]]

# The quantiles that are taken: for histograms, and for p05, p50, p95.
_PERCENTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
# The matrices whose row products `realised` are, if it was measured what a step really did: r, and
# b = r − 2h (see `first_order_error`).
REALISED = ("G", "d", "r", "b")
LEVELS = (*QUANTILE_LEVELS, *_PERCENTILES.values())
# What a weight makes of a row, which grows with the row.
_GROWING = ("d", "e", "rest", "z")


@dataclass
class Numbers:
    """What came from the device of one layer.

    Attributes:
        rows_seen: R.
        rows_total: T.
        groups: groups of the layer.
        vectors: names of the matrices whose row products there are.
        values: the arrays, by name.
        exact: nothing speaks against γ = c·GᵀΦ with a known c, so that what the parameters say
            holds for the rows.
        suspected: at the last measured step γ seemed to be more than c·GᵀΦ.
        verified: γ is what these rows' calls have contributed, which needs no estimate.
        bias_alone: no weight is trained.
        tolerance: what rounding may do to a dot product, relative to the sum of its terms.
        factor: c; NaN if unknown.
        entry_rows: of which row each of `scale_entries_of_rows` is; None: all, row by row.
        gamma_gamma: ‖γ‖²; others alike, with w = −u and a for what was applied, negative too. With
            γ′, what the layer has contributed to γ, which differs where others use its parameters:
            own_gamma = ⟨γ, γ′⟩ and own_w = ⟨w, γ′⟩; NaN if unknown.
    """

    rows_seen: int
    rows_total: int
    groups: int
    vectors: tuple[str, ...]
    values: dict[str, Array]
    exact: bool
    suspected: bool
    verified: bool
    bias_alone: bool
    tolerance: float
    factor: float
    entry_rows: Index | None
    dots: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The measures of one layer.

    Attributes:
        values: by name.
        errors: standard errors of those that are not exact.
        quantiles: of `scale` and `row_cosine`, at `QUANTILE_LEVELS`.
        idle_seen: idle rows among those seen.
        suspected: γ seems to be more than c·GᵀΦ, beyond what sampling and rounding explain.
        holds_more: it is.
        common_unknown: rows are idle, and the sample was not asked how alike the others are.
    """

    values: dict[str, float]
    errors: dict[str, float]
    quantiles: dict[str, tuple[float, ...]]
    idle_seen: int
    suspected: bool
    holds_more: bool
    common_unknown: bool


def measure(layers: Mapping[str, Numbers], fail: Fail = raised) -> dict[str, Measured]:
    """Every measure of every layer, without those that fail; `fail` gets path and exception."""
    alike: dict[object, list[str]] = defaultdict(list)
    for path, numbers in layers.items():
        names = tuple(sorted(numbers.values))
        kind = numbers.rows_seen, numbers.vectors, numbers.bias_alone, names, tuple(numbers.dots)
        alike[kind].append(path)

    def together(paths: Sequence[str]) -> dict[str, Measured]:
        return dict(zip(paths, _measure_alike([layers[path] for path in paths]), strict=True))

    found = of_alike(alike.values(), together, fail)
    return {path: found[path] for path in layers if path in found}


def _stacked(arrays: Sequence[Array | Index], fill: float = np.nan) -> Array:
    """All of them in one array; rows of different length are filled up."""
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    stacked = np.full((len(arrays), max(map(len, arrays))), fill)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


class _Together:
    """Layers that are alike, as arrays (layers, …)."""

    def __init__(self, layers: Sequence[Numbers]) -> None:
        self.layers = layers
        first = layers[0]
        self.values = {n: _stacked([x.values[n] for x in layers]) for n in first.values}
        self.groups = np.array([float(x.groups) for x in layers])
        self.dots = {n: np.array([x.dots[n] for x in layers]) for n in first.dots}
        factor = np.array([x.factor for x in layers])
        self.unit = np.where(np.isnan(factor), 1.0, factor)
        self.known_unit = ~np.isnan(factor)
        self._place = {name: i for i, name in enumerate(first.vectors)}
        total = np.array([float(x.rows_total) for x in layers])
        self.sample = Sample(total, self.rows("G", "G") != 0)
        expected = np.array([x.exact for x in layers])
        self.tolerance = np.array([x.tolerance for x in layers])
        G_G, whole = over_rows(self.rows("G", "G"), self.sample), self.whole("G_G")
        e_G = over_rows(self.rows("e", "G"), self.sample)
        verified = np.array([x.verified for x in layers])
        self.holds_more = (expected & ~verified) & measures.holds_more(
            e_G if whole is None else by_ratio(e_G, G_G, whole, self.sample),
            self.dots["own_gamma"],
            over_rows(np.abs(self.rows("e", "G")), self.sample).total,
            self.tolerance,
            self.sample,
        )
        if whole is not None:
            self.holds_more &= measures.represents(G_G.total, whole)
        # A sample is believed for good the second time; all rows are at once.
        twice = np.array([x.suspected for x in layers]) | (self.sample.variance_share == 0)
        self.suspected, self.holds_more = self.holds_more, self.holds_more & twice
        self.exact = expected & ~self.suspected

    def has(self, *vectors: str) -> bool:
        return all(vector in self._place for vector in vectors)

    def rows(self, a: str, b: str) -> PerRow:
        """a_r·b_r of the rows seen, 0 of idle ones."""
        found: PerRow = self.values["products"][:, :, self._place[a], self._place[b]]
        if a == b == "G":
            return found
        return np.where(self.sample.active, found, 0.0)

    def realised(self, a: str, b: str) -> PerRow:
        """The same of what really happened."""
        found: PerRow = self.values["realised"][:, :, REALISED.index(a), REALISED.index(b)]
        return np.where(self.sample.active, found, 0.0)

    def sum(self, a: str, b: str, exact: PerLayer | None = None) -> Sum:
        """⟨a, b⟩ over all rows: exact where that may be trusted."""
        known = None if exact is None else np.where(self.exact, exact, np.nan)
        rows = self.rows(a, b)
        if a == b and a in _GROWING:
            return self.growing(rows)
        return over_rows(rows, self.sample, known)

    def growing(self, rows: PerRow) -> Sum:
        """The sum over all rows of what grows with their size, where that is known of all."""
        found = over_rows(rows, self.sample)
        return found if self.sizes is None else by_size(found, rows, self.sizes, self.sample)

    @cached_property
    def sizes(self) -> Sizes | None:
        """‖φ_r‖² of the rows; None where no pass over all of them told their sum."""
        total, deviation = self.whole("scale_sum", 0), self.whole("scale_deviation", 0)
        if "scale" not in self.values or total is None or deviation is None:
            return None
        rows = np.where(self.sample.active, self.values["scale"], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            squares = deviation**2 + total**2 / _active(self)
        return Sizes(rows, total, squares)

    def growing_with_gradients(self, rows: PerRow, exact: PerLayer | None) -> Sum:
        """The sum over all rows, exact if that is given, of what grows with ‖g_r‖²."""
        found, concentration = over_rows(rows, self.sample, exact), self.whole("G_concentration", 0)
        total = self.whole("G_G")
        if exact is not None or total is None or concentration is None:
            return found
        sizes = Sizes(self.rows("G", "G"), total, concentration * total**2)
        return by_size(found, rows, sizes, self.sample)

    def whole(self, name: str, power: int = 2) -> PerLayer | None:
        """What a pass over all rows summed up, in the units of the optimizer's gradient."""
        if name not in self.values:
            return None
        found: PerLayer = self.values[name].reshape(len(self.layers)) * self.unit**power
        return found


def _measure_alike(layers: Sequence[Numbers]) -> list[Measured]:
    x = _Together(layers)
    G_G = x.sum("G", "G", x.whole("G_G"))
    found: dict[str, Estimate] = {"idle_share": measures.idle_share(x.sample, _active(x))}
    # Both sides of a ratio must be of one kind: the parameters', or the rows'.
    e_G, e_e = x.sum("e", "G", x.dots["own_gamma"]), x.sum("e", "e")
    found["gradient_cosine"] = measures.gradient_cosine(e_G, e_e, G_G, x.sample)
    if x.has("rest"):
        found |= _of_scales(x)
    distributions = _scale_distribution(x)
    if x.has("d"):
        found |= _of_update(x, G_G)
        cosines = measures.row_cosines(x.rows("d", "G"), x.rows("d", "d"), x.rows("G", "G"))
        found["row_cosine_mean"] = measures.row_cosine_mean(cosines, x.sample, x.tolerance)
        if "realised" in x.values:
            found |= _of_realised(x)
        share = x.sample.share_of(~np.isnan(cosines))
        distributions["row_cosine"] = quantiles(cosines, LEVELS, share, Ends(-1, 1), x.tolerance)
    if (common := _common_share(x)) is not None:
        found["common_share"] = common
    if "attainable_cosine" in x.values:
        found["attainable_cosine"] = _certain(x.values["attainable_cosine"].reshape(-1))
    found |= {name: _certain(value) for name, value in _of_parameters(x).items()}
    for name, (values, errors) in distributions.items():
        for i, suffix in enumerate(_PERCENTILES, start=len(QUANTILE_LEVELS)):
            found[f"{name}_{suffix}"] = Estimate(values[:, i], errors[:, i])
    return [_pick(x, i, found, distributions) for i in range(len(layers))]


def _pick(
    x: _Together,
    i: int,
    found: Mapping[str, Estimate],
    distributions: Mapping[str, tuple[Array, Array]],
) -> Measured:
    n = len(QUANTILE_LEVELS)
    return Measured(
        values={name: float(estimate.value[i]) for name, estimate in found.items()},
        errors={
            name: float(estimate.error[i]) for name, estimate in found.items() if estimate.error[i]
        },
        quantiles={
            name: tuple(values[i, :n].tolist()) for name, (values, _) in distributions.items()
        },
        idle_seen=int((~x.sample.active[i]).sum()),
        suspected=bool(x.suspected[i]),
        holds_more=bool(x.holds_more[i]),
        common_unknown=bool("common" not in x.values and _active(x)[i] < x.sample.total[i]),
    )


def _certain(value: PerLayer) -> Estimate:
    return Estimate(value, np.zeros_like(value))


def _active(x: _Together) -> PerLayer:
    """How many of all rows are active; NaN where only the sample tells."""
    whole = x.whole("active", 0)
    return np.full(len(x.layers), np.nan) if whole is None else whole


def _of_update(x: _Together, G_G: Sum) -> dict[str, Estimate]:
    d_d = x.sum("d", "d")
    d_G = x.sum("d", "G", x.dots["own_w"])
    if x.has("bias"):
        B_B = x.sum("bias", "bias")
        weight = x.rows("d", "d") - 2 * x.rows("d", "bias") + x.rows("bias", "bias")
        A_A = x.growing(np.maximum(weight, 0.0))
    else:
        nothing = Sum(np.zeros_like(d_d.total), np.zeros_like(d_d.spread))
        A_A, B_B = (nothing, d_d) if x.layers[0].bias_alone else (d_d, nothing)
    rate = measures.effective_lr(d_G, G_G, x.sample)
    # Whatever the gradient holds besides these rows, it is part of the loss that descends.
    descent = measures.descent(over_rows(x.rows("d", "G"), x.sample, x.dots["own_w"]), x.sample)
    in_units = x.known_unit | ~np.isnan(x.dots["own_w"])
    return {
        "update_cosine": measures.update_cosine(d_G, d_d, G_G, x.sample),
        "effective_lr": Estimate(np.where(x.known_unit, rate.value, np.nan), rate.error),
        "harmed_fraction": measures.harmed_fraction(x.rows("d", "G"), x.sample, d_d),
        "bias_share": measures.bias_share(A_A, B_B, x.sample),
        "update_ratio": measures.update_ratio(d_d, x.sum("z", "z"), x.sample),
        "descent": Estimate(np.where(in_units, descent.value, np.nan), descent.error),
    }


def _of_realised(x: _Together) -> dict[str, Estimate]:
    def total(a: str, b: str) -> Sum:
        return over_rows(x.realised(a, b), x.sample)

    r_r, r_G = total("r", "r"), total("r", "G")
    G_G = x.sum("G", "G", x.whole("G_G"))
    known = np.where(x.exact, x.dots["own_w"], np.nan)
    return {
        # This layer's own part of it is known exactly.
        "realised_cosine": measures.realised_cosine(
            by_regression(r_G, total("d", "G"), known), r_r, G_G, x.sample
        ),
        "single_layer_share": measures.single_layer_share(
            total("r", "d"), r_r, total("d", "d"), x.sample
        ),
        "first_order_error": measures.first_order_error(total("b", "b"), r_r, x.sample),
    }


def _of_scales(x: _Together) -> dict[str, Estimate]:
    if "scale" in x.values:
        scale = np.where(x.sample.active, x.values["scale"], 0.0)
        own_G, own_own = scale * x.rows("G", "G"), scale**2 * x.rows("G", "G")
    else:
        own_G, own_own = x.rows("own", "G"), x.rows("own", "own")
    of_G = x.growing_with_gradients(own_G, x.whole("own_G"))
    of_own = x.growing_with_gradients(own_own, x.whole("own_own"))
    # Of the rows' own gradients, as these sums are, whatever the parameters' gradient holds.
    all_G = over_rows(x.rows("G", "G"), x.sample, x.whole("G_G"))
    ratio = measures.interference_ratio(x.sum("rest", "rest"), of_own, x.sample)
    return {
        "diagonal_cosine": measures.diagonal_cosine(of_G, of_own, all_G, x.sample),
        "interference_ratio": Estimate(np.where(x.known_unit, ratio.value, np.nan), ratio.error),
        **_of_all_scales(x),
    }


def _of_all_scales(x: _Together) -> dict[str, Estimate]:
    """Mean, spread and largest: of all rows where a pass over them told, else from the sample."""
    groups = x.groups[:, None]
    if (sums := x.whole("scale_sum", 0)) is not None:
        count, deviation = _active(x), x.whole("scale_deviation", 0)
        assert deviation is not None
        largest = x.whole("scale_max", 0)
        assert largest is not None
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


def _scales_of_rows(x: _Together) -> tuple[PerLayer, PerRow, PerRow, PerRow]:
    """Pivot; of every row Σ (s − pivot) and Σ (s − pivot)² over its groups, and the largest."""
    if "scale" in x.values:
        scale = x.values["scale"]
        pivot = scale[:, 0] if scale.shape[1] else np.zeros(len(scale))
        shifted = scale - pivot[:, None]
        return pivot, shifted, shifted**2, scale
    pivot = x.values["scale_pivot"].reshape(len(x.layers), -1)
    return (
        pivot[:, 0] if pivot.shape[1] else np.zeros(len(pivot)),
        x.values["scale_sums"],
        x.values["scale_norms"] ** 2,
        x.values["scale_largest"],
    )


def _scale_distribution(x: _Together) -> dict[str, tuple[Array, Array]]:
    if "scale_entries" in x.values:
        entries = x.values["scale_entries"]
        looked_at = np.array([float(len(layer.values["scale_entries"])) for layer in x.layers])
        share = variance_share(looked_at, x.sample.total, (~np.isnan(entries)).sum(1))
        return {"scale": _of_entries(x, entries, share)}
    if "scale" in x.values:
        entries = np.where(x.sample.active, x.values["scale"], np.nan)
    elif "scale_entries_of_rows" in x.values:
        rows = _stacked([_rows_of_entries(layer) for layer in x.layers], fill=0)
        active = np.take_along_axis(x.sample.active, rows.astype(np.int64), 1)
        entries = np.where(active, x.values["scale_entries_of_rows"], np.nan)
    else:
        return {}
    # Entries of one row may be alike, so that they count as one; of all rows' some were chosen.
    some = np.array([float(len(_rows_of_entries(layer))) for layer in x.layers])
    share = variance_share(some, x.sample.seen * x.groups, (~np.isnan(entries)).sum(1))
    return {"scale": _of_entries(x, entries, share + x.sample.share_of(x.sample.active))}


def _of_entries(x: _Together, entries: Array, share: PerLayer) -> tuple[Array, Array]:
    """Quantiles of scales, of which no row's is negative, or beyond what a pass over all tells."""
    with np.errstate(invalid="ignore"):
        mean = np.nansum(entries, axis=1) / (~np.isnan(entries)).sum(1)
    sums, deviation = x.whole("scale_sum", 0), x.whole("scale_deviation", 0)
    largest, count = x.whole("scale_max", 0), _active(x)
    if x.layers[0].bias_alone:
        ends = Ends(mean[:, None], mean[:, None])
    elif sums is None or deviation is None or largest is None:
        ends = Ends(0.0, np.nan)
    else:
        levels = np.asarray(LEVELS)
        with np.errstate(invalid="ignore", divide="ignore"):
            # So far off a share of the rows may be at most (Chebyshev).
            of_all, off = (sums / count)[:, None], (deviation**2 / count)[:, None]
            low = np.maximum(of_all - np.sqrt(off / levels), 0.0)
            high = np.minimum(of_all + np.sqrt(off / (1 - levels)), largest[:, None])
        ends = Ends(low, high)
    return quantiles(entries, LEVELS, share, ends, x.tolerance * np.abs(mean))


def _rows_of_entries(layer: Numbers) -> Index:
    if layer.entry_rows is not None:
        return layer.entry_rows
    return np.arange(layer.rows_seen * layer.groups) // layer.groups


def _common_share(x: _Together) -> Estimate | None:
    """Exact where no row is idle, else from the sample; None if that was not asked to tell."""
    active = _active(x)
    sampled = None
    if "common" in x.values:
        estimated = over_rows(x.sample.active.astype(np.float64), x.sample).total
        count = np.where(np.isnan(active), estimated, active)
        sampled = measures.common_share_of_rows(
            x.values["common"], x.values["weight_norms"] ** 2, count, x.sample
        )
    norm, squares = x.whole("weight_sum", 0), x.whole("weight_squares", 0)
    if norm is None or squares is None:
        return sampled
    exact = measures.common_share(norm**2, x.sample.total, squares)
    none_idle = active == x.sample.total
    if sampled is None:
        return _certain(np.where(none_idle, exact, np.nan))
    return Estimate(
        np.where(none_idle, exact, sampled.value), np.where(none_idle, 0.0, sampled.error)
    )


def _of_parameters(x: _Together) -> dict[str, PerLayer]:
    dots = x.dots
    found = {}
    if "w_w" in dots:  # w = −u, and so is a
        found["parameter_cosine"] = measures.parameter_cosine(
            -dots["w_gamma"], dots["w_w"], dots["gamma_gamma"]
        )
    if "a_w" in dots:
        found["projection_cosine"] = measures.projection_cosine(
            dots["a_w"], dots["a_a"], dots["w_w"]
        )
        found["applied_cosine"] = measures.applied_cosine(
            -dots["a_gamma"], dots["a_a"], dots["gamma_gamma"]
        )
    return found
