"""The measures of each layer, with standard errors, from the numbers on the host.

All layers are measured together, in arrays (layers,) or (layers, rows): one operation for all of
them costs little more than for one. What a layer does not have is NaN.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
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
)
from adiv_monitor.maths.sums import Array, StepSums, Table, blank

# The quantiles of a distribution over rows, by the end of their names.
LEVELS = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
# Layers with at most this many rows are padded to one length; others to less than twice theirs.
_FILLED = 255
# Reasons that say that γ is not the gradient of the loss; with the others it is, or may be.
_NOT_THE_LOSSES = ("weighed", "earlier", "apart")


@dataclass(eq=False)
class Measured:
    """The measures of all layers.

    Attributes:
        count: the number of layers.
        values: by measure, values of all layers, standard errors, and which layers have it:
            (3, layers).
    """

    count: int
    values: dict[str, Array] = field(default_factory=dict)

    def put(self, layers: Index, found: Mapping[str, Estimate], known: Mask | bool = True) -> None:
        """Add measures of some layers, which `known` of them have."""
        for name, estimate in found.items():
            of_all = self.values.setdefault(name, np.zeros((3, self.count)))
            for line, values in zip(of_all, (*estimate, known), strict=True):
                line[layers] = values

    def put_levels(
        self, layers: Index, name: str, levels: tuple[Array, Array], known: Mask | bool = True
    ) -> None:
        """Add the quantiles of a distribution at `LEVELS`, and their errors."""
        for suffix, value, error in zip(LEVELS, *(of.T for of in levels), strict=True):
            self.put(layers, {f"{name}_{suffix}": Estimate(value, error)}, known)


@np.errstate(all="ignore")  # what a layer does not have is NaN
def measure(sums: StepSums, *, updated: bool, rates: PerLayer | None = None) -> Measured:
    """Return all measures of all layers.

    Args:
        sums: the numbers, in the units of the gradient that the optimizer saw.
        updated: an optimizer has stepped.
        rates: the learning rate of every layer; None, NaN: not known.
    """
    found = Measured(len(sums.paths))
    for layers in _alike(sums):
        x = _Layers(sums, layers)
        _measure(x, found, updated=updated)
        if updated:
            found.put(layers, _of_sizes(x.layers))
            if rates is not None:
                u, rate = x.layers, rates[layers]
                rms = measures.update_rms(u["w_w"], u["size"], rate)
                found.put(layers, {"update_rms": _certain(rms)}, ~np.isnan(rate))
    _add_loads(sums, found)
    return found


def _add_loads(sums: StepSums, found: Measured) -> None:
    """Add how evenly rows are spread over the experts of a layer."""
    for layer in np.unique(sums.loads["layer"]):
        lines = sums.of("loads", layer)
        number = lines["number"].astype(np.int64)
        rows = np.bincount(number, lines["rows"]).astype(np.float64)
        for measure in (
            measures.expert_load_max,
            measures.expert_load_cv,
            measures.idle_expert_share,
        ):
            value = _certain(np.array([measure(rows)]))
            found.put(np.array([layer]), {measure.__name__: value})


def _alike(sums: StepSums) -> list[Index]:
    """Return groups of layers with similarly many rows."""
    alike: dict[object, list[int]] = defaultdict(list)
    for i, counts in enumerate(zip(sums.seen, sums.lines("moves"), strict=True)):
        alike[tuple(max(int(n), _FILLED).bit_length() for n in counts)].append(i)
    return [np.array(layers) for layers in alike.values()]


def _padded(sums: StepSums, table: str, layers: Index) -> tuple[Table, PerLayer]:
    """Return a table's lines of some layers, (layers, lines), and the number of each one's."""
    lines: Table = getattr(sums, table)
    starts, ends = (np.searchsorted(lines["layer"], layers, side) for side in ("left", "right"))
    counts = ends - starts
    places = np.arange(counts.max(initial=0))
    is_line = places < counts[:, None]
    found = blank(table, is_line.shape)
    found[is_line] = lines[(starts[:, None] + places)[is_line]]
    return found, counts.astype(np.float64)


class _Layers:
    """Layers in arrays (layers, …)."""

    def __init__(self, sums: StepSums, index: Index) -> None:
        self.sums, self.index, self.layers = sums, index, sums.layers[index]
        self.rows, seen = _padded(sums, "rows", index)
        layers, rows = self.layers, self.rows
        self.sample = Sample(layers["total"].astype(np.float64), rows["G_G"] != 0, seen)
        self.bias_alone = np.array([sums.about[i].bias_alone for i in index])
        self.has_one, self.has_scale = layers["groups"] == 1, layers["groups"] > 0
        self.groups = np.maximum(layers["groups"], 1.0)
        # ⟨γ, γ′⟩ and ⟨w, γ′⟩ with γ′ the layer's contribution to γ, from which γ differs where
        # other layers use its parameters. −⟨γ, ΔΘ⟩ is not the descent of the loss if γ is not its
        # gradient; then only the rows know.
        shared, others = layers["reason"] == "shared", np.isin(layers["reason"], _NOT_THE_LOSSES)
        self.exact = layers["reason"] == ""
        self.own_gamma = np.where(self.exact, layers["gamma_gamma"], np.nan)
        self.own_w = np.where(shared | others, np.nan, layers["w_gamma"])
        self.known_unit = ~np.isnan(layers["factor"])
        # A product that other code spoiled is NaN, although the vectors are finite.
        w_w, squares = layers["w_w"], layers["w_w"] * layers["gamma_gamma"]
        self.knows_gamma = ~np.isnan(layers["w_gamma"]) | ~np.isfinite(squares)
        self.knows_applied = ~np.isnan(layers["a_w"]) | ~np.isfinite(layers["a_a"] * w_w)
        self.tolerance = sums.tolerance[index]

    def per_row(self, name: str) -> PerRow:
        """Return a number of the sampled rows, such as a_r·b_r: `a_b`; 0 for zero-gradient rows."""
        found: PerRow = self.rows[name]
        return found if name == "G_G" else np.where(self.sample.active, found, 0.0)

    @cached_property
    def G_G(self) -> Sum:
        """‖G‖² of these rows, whatever else the parameters' gradient holds."""
        return over_rows(self.per_row("G_G"), self.sample, self.layers["G_G"])

    def with_G(self, name: str, exact: PerLayer) -> Sum:
        """Return ⟨a, G⟩ over all rows: `exact` where not NaN, else by its ratio to ‖G‖²."""
        found = over_rows(self.per_row(name), self.sample, exact)
        of_G = over_rows(self.per_row("G_G"), self.sample)
        total = np.where(np.isnan(exact), self.layers["G_G"], np.nan)
        return by_ratio(found, of_G, total, self.sample)

    def growing(self, rows: PerRow) -> Sum:
        """Return the sum over all rows of values that grow with ‖φ_r‖²: by size if it is known."""
        return by_size(over_rows(rows, self.sample), rows, self.sizes, self.sample)

    def square(self, name: str) -> Sum:
        """Return ‖a‖² over all rows, with a_r a move or an output, which grow with ‖φ_r‖."""
        return self.growing(self.per_row(name))

    @cached_property
    def sizes(self) -> Sizes:
        """‖φ_r‖² of the rows; the sums are NaN where no pass over all rows determined them."""
        x = self.layers
        total = np.where(self.has_one, x["scale_sum"], np.nan)
        return Sizes(self.scale, total, x["scale_off"] ** 2 + total**2 / x["active"])

    @cached_property
    def scale(self) -> PerRow:
        """‖φ_r‖² of rows that have one scale; 0 for the others and for zero-gradient rows."""
        return np.where(self.sample.active & self.has_one[:, None], self.rows["scale"], 0.0)

    def growing_with_gradients(self, rows: PerRow, exact: PerLayer) -> Sum:
        """Return the sum over all rows of values that grow with ‖g_r‖²: `exact` where not NaN."""
        total = np.where(np.isnan(exact), self.layers["G_G"], np.nan)
        sizes = Sizes(self.per_row("G_G"), total, self.layers["concentration"] * total**2)
        return by_size(over_rows(rows, self.sample, exact), rows, sizes, self.sample)


def _measure(x: _Layers, found: Measured, *, updated: bool) -> None:
    """Add the measures of some layers."""
    index, sample = x.index, x.sample
    e_G, e_e, G_G = x.with_G("e_G", x.own_gamma), x.square("e_e"), x.G_G
    layers = x.layers
    found.put(index, {"idle_share": measures.idle_share(sample, layers["active"])})
    found.put(index, {"gradient_cosine": measures.gradient_cosine(e_G, e_e, G_G, sample)})
    found.put(index, _of_rms(x))
    silent = measures.silent_share(layers["silent"], layers["width"], sample)
    found.put(index, {"silent_share": silent}, layers["ranks"] < 2)
    found.put(index, {"gradient_norm": _certain(np.sqrt(layers["gamma_gamma"]))})
    found.put(index, {"common_share": _common_share(x)}, layers["has_common"])
    attainable = _certain(layers["attainable"])
    found.put(index, {"attainable_cosine": attainable}, layers["has_attainable"])
    found.put(index, _of_scales(x), x.has_scale)
    found.put_levels(index, "scale", _scale_quantiles(x), x.has_one)
    if not updated:
        return
    of_update = _of_update(x)
    found.put(index, {"descent": of_update.pop("descent")}, x.knows_gamma)
    found.put(index, of_update)
    known = (x.knows_gamma, x.knows_applied, x.knows_gamma & x.knows_applied)
    for (name, cosine), has in zip(_of_parameters(x).items(), known, strict=True):
        found.put(index, {name: cosine}, has)
    cosines = measures.row_cosines(x.per_row("G_d"), x.per_row("d_d"), x.per_row("G_G"))
    found.put(index, {"row_cosine_mean": measures.row_cosine_mean(cosines, sample, x.tolerance)})
    share = sample.share_of(~np.isnan(cosines))
    levels = quantiles(cosines, [*LEVELS.values()], share, Ends(-1, 1), x.tolerance)
    found.put_levels(index, "row_cosine", levels)
    if (moved := layers["moved"] > 0).any():
        _add_realised(x.sums, index[moved], found)


def _of_rms(x: _Layers) -> dict[str, Estimate]:
    count = over_rows(x.sample.active.astype(np.float64), x.sample, x.layers["active"])
    of = count, x.layers["width"], x.sample
    of_G, z_z = measures.activation_gradient_rms(x.G_G, *of), x.square("z_z")
    fourth, zeros = (over_rows(x.per_row(name), x.sample) for name in ("fourth", "zeros"))
    # Outputs' fourth powers grow with ‖φ_r‖⁴. Of the sum of their squares the longest row is known.
    squares = over_rows(x.scale**4, x.sample).total + x.layers["scale_max"] ** 4
    sizes = Sizes(x.scale**2, x.sizes.squares, squares)
    fourth = by_size(fourth, x.per_row("fourth"), sizes, x.sample)
    return {
        "activation_rms": measures.activation_rms(z_z, *of),
        "activation_max": measures.activation_max(x.per_row("largest"), x.sample),
        "activation_kurtosis": measures.activation_kurtosis(fourth, z_z, *of),
        "zero_share": measures.zero_share(zeros, *of),
        "activation_gradient_rms": Estimate(np.where(x.known_unit, of_G.value, np.nan), of_G.error),
    }


def _of_sizes(of: Table) -> dict[str, Estimate]:
    w_w, theta_theta = of["w_w"], of["theta_theta"]
    found = {
        "update_norm": np.sqrt(w_w),
        "weight_norm": np.sqrt(theta_theta),
        "weight_update_ratio": measures.weight_update_ratio(w_w, theta_theta),
        "unchanged_share": measures.unchanged_share(of["changed"], of["reached"]),
    }
    return {name: _certain(value) for name, value in found.items()}


def _certain(value: PerLayer) -> Estimate:
    return Estimate(value, np.zeros_like(value))


def _of_update(x: _Layers) -> dict[str, Estimate]:
    d_d, G_G = x.square("d_d"), x.G_G
    d_G = x.with_G("G_d", np.where(x.exact, x.own_w, np.nan))
    by_bias = np.where(x.bias_alone[:, None], x.per_row("d_d"), x.per_row("bias_bias"))
    of_bias = over_rows(by_bias, x.sample)
    squares = x.per_row("d_d") - 2 * x.per_row("d_bias") + x.per_row("bias_bias")
    of_weight = x.growing(np.where(x.bias_alone[:, None], 0.0, np.maximum(squares, 0.0)))
    rate = measures.effective_lr(d_G, G_G, x.sample)
    # What γ holds besides these rows is part of the loss, too. If γ is not its gradient, `own_w` is
    # NaN, and the rows alone count.
    descent = measures.descent(x.with_G("G_d", x.own_w), x.sample)
    in_units = x.known_unit | ~np.isnan(x.own_w)
    return {
        "update_cosine": measures.update_cosine(d_G, d_d, G_G, x.sample),
        "effective_lr": Estimate(np.where(x.known_unit, rate.value, np.nan), rate.error),
        "harmed_fraction": measures.harmed_fraction(x.per_row("G_d"), x.sample, d_d),
        "bias_share": measures.bias_share(of_weight, of_bias, x.sample),
        "update_ratio": measures.update_ratio(d_d, x.square("z_z"), x.sample),
        "descent": Estimate(np.where(in_units, descent.value, np.nan), descent.error),
    }


def _add_realised(sums: StepSums, layers: Index, found: Measured) -> None:
    """Add the measures of the realised move of some layers."""
    rows, seen = _padded(sums, "moves", layers)
    knows_loss = ~np.isnan(rows["G_G"]).all(1)
    active = (rows["G_G"] != 0) & (np.arange(rows.shape[1]) < seen[:, None])
    sample = Sample(sums.layers["moved"][layers].astype(np.float64), active, seen)

    def summed(name: str) -> Sum:
        return over_rows(np.where(active, rows[name], 0.0), sample)

    r_r, b_b, d_d, G_G = map(summed, ("r_r", "b_b", "d_d", "G_G"))
    share = measures.single_layer_share(summed("r_d"), r_r, d_d, sample)
    error = measures.first_order_error(b_b, r_r, sample)
    cosine = measures.realised_cosine(summed("G_r"), r_r, G_G, sample)
    found.put(layers, {"single_layer_share": share, "first_order_error": error})
    found.put(layers, {"realised_cosine": cosine}, knows_loss)


def _of_scales(x: _Layers) -> dict[str, Estimate]:
    has_one, layers = x.has_one[:, None], x.layers
    G_G = x.per_row("G_G")
    own_G = np.where(has_one, x.scale * G_G, x.per_row("own_G"))
    own_own = np.where(has_one, x.scale**2 * G_G, x.per_row("own_own"))
    of_G = x.growing_with_gradients(own_G, layers["own_G"])
    of_own = x.growing_with_gradients(own_own, layers["own_own"])
    ratio = measures.interference_ratio(x.square("rest_rest"), of_own, x.sample)
    return {
        "diagonal_cosine": measures.diagonal_cosine(of_G, of_own, x.G_G, x.sample),
        "interference_ratio": Estimate(np.where(x.known_unit, ratio.value, np.nan), ratio.error),
        **_of_all_scales(x),
    }


def _of_all_scales(x: _Layers) -> dict[str, Estimate]:
    """Return the scales' mean, spread and maximum, from a pass over all rows or the sample."""
    groups, has_one, layers = x.groups[:, None], x.has_one[:, None], x.layers
    count, active, scale = layers["active"], x.sample.active, x.rows["scale"]
    means = np.where(has_one, scale, x.rows["mean"])
    off = np.where(has_one, 0.0, x.rows["off"])
    pivot = np.nan_to_num(means[:, 0] if means.size else np.zeros(len(means)))
    shifted = means - pivot[:, None]
    squares = off**2 + groups * shifted**2
    count_of_active = over_rows(active * groups, x.sample)
    sum_of_active = over_rows(np.where(active, means * groups, 0.0), x.sample)
    of_rows = {
        "scale_mean": measures.scale_mean(sum_of_active, count_of_active, x.sample),
        "scale_cv": measures.scale_cv_of_rows(shifted * groups, squares, x.groups, pivot, x.sample),
        "scale_max": measures.scale_max_of_rows(scale, x.sample),
    }
    of_all = {
        "scale_mean": layers["scale_sum"] / count,
        "scale_cv": measures.scale_cv(layers["scale_off"] ** 2, layers["scale_sum"], count),
        "scale_max": np.where(count > 0, layers["scale_max"], np.nan),
    }
    known = layers["knows_scales"]
    return {
        name: Estimate(np.where(known, of_all[name], value), np.where(known, 0.0, error))
        for name, (value, error) in of_rows.items()
    }


def _scale_quantiles(x: _Layers) -> tuple[Array, Array]:
    """Return quantiles of the scales, bounded by 0 and by what a pass over all rows implies."""
    layers, active = x.layers, x.sample.active
    scales, share = np.where(active, x.rows["scale"], np.nan), x.sample.share_of(active)
    known = layers["knows_scales"]
    mean = np.nansum(scales, axis=1) / active.sum(1)
    # Chebyshev's inequality bounds how far a share of the rows lies from the mean.
    levels, of_all = np.array([*LEVELS.values()]), (layers["scale_sum"] / layers["active"])[:, None]
    off = (layers["scale_off"] ** 2 / layers["active"])[:, None]
    low = np.maximum(of_all - np.sqrt(off / levels), 0.0)
    high = np.minimum(of_all + np.sqrt(off / (1 - levels)), layers["scale_max"][:, None])
    low, high = np.where(known[:, None], low, 0.0), np.where(known[:, None], high, np.nan)
    alone = x.bias_alone[:, None]
    ends = Ends(*(np.where(alone, mean[:, None], end) for end in (low, high)))
    return quantiles(scales, levels.tolist(), share, ends, x.tolerance * np.abs(mean))


def _common_share(x: _Layers) -> Estimate:
    estimated = over_rows(x.sample.active.astype(np.float64), x.sample).total
    count = np.where(np.isnan(x.layers["active"]), estimated, x.layers["active"])
    products, squares = x.rows["common"], x.rows["square"]
    return measures.common_share(products, squares, count, x.sample)


def _of_parameters(x: _Layers) -> dict[str, Estimate]:
    # w = −u, and a has the opposite sign of the applied update as well.
    of = x.layers
    w_w, a_a, gamma_gamma = of["w_w"], of["a_a"], of["gamma_gamma"]
    found = {
        "parameter_cosine": measures.parameter_cosine(-of["w_gamma"], w_w, gamma_gamma),
        "projection_cosine": measures.projection_cosine(of["a_w"], a_a, w_w),
        "applied_cosine": measures.applied_cosine(-of["a_gamma"], a_a, gamma_gamma),
    }
    return {name: _certain(value) for name, value in found.items()}
