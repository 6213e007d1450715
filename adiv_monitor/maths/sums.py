"""The numbers of a measured step, as tables for all layers, from which the readings follow.

A table is a structured array. `StepSums.layers` has one line for each layer. The other tables have
any number of lines for each, in the order of the layers: sampled rows, equations and so on. What is
not known is NaN. Tables of several ranks are merged by concatenation of lines and addition of sums
(`step/merge.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from adiv_monitor.features.rows import Index

Array = np.ndarray[Any, np.dtype[np.float64]]
Table = np.ndarray[Any, np.dtype[np.void]]


# The vectors of a row whose dot products are computed, in their order: the part of e by the row's
# own scale (of rows with several scales), e the move by a plain gradient step, G = ∂L/∂z, d the
# move by the optimizer's step, the part of d by the bias, z the output, the part of e by the other
# rows, r the realised move of the step, and b = r − 2h (see `measures.first_order_error`).
VECTORS = ("own", "e", "G", "d", "bias", "z", "rest", "r", "b")
Pairs = tuple[tuple[str, str], ...]


def _pairs(vectors: Sequence[str], chain: Sequence[str], *others: tuple[str, str]) -> Pairs:
    """Return all squares of vectors, then neighbours in a chain that leads them, then others."""
    return (*((v, v) for v in vectors), *pairwise(chain), *others)


@cache
def pairs_of(vectors: tuple[str, ...]) -> Pairs:
    """Return the pairs of a row's vectors whose dot products measures need."""
    chain = [v for v in VECTORS[:5] if v in vectors]
    return _pairs(vectors, chain, *([("own", "G")] if "own" in vectors else []))


# The vectors on the probe, and the pairs of them, whose dot products are in `StepSums.moves`.
MOVES = ("G", "r", "d", "b", "z")
REALISED = _pairs(MOVES, MOVES[:3])
PAIRS = pairs_of(VECTORS[:7])


def names_of(pairs: Pairs) -> tuple[str, ...]:
    """Return the columns of the dot products of pairs: `a_b` is a_r·b_r."""
    return tuple(f"{a}_{b}" for a, b in pairs)


def _columns(kind: str, *names: str) -> list[tuple[str, str]]:
    return [(name, kind) for name in names]


DOTS = ("gamma_gamma", "w_w", "w_gamma", "a_a", "a_w", "a_gamma", "theta_theta")
# Numbers of a layer's parameters: dot products, counts, and the former without what an earlier
# layer counts already, since it uses the same parameters.
ONCE = {"once_gamma": "gamma_gamma", "once_w": "w_w"}
OF_PARAMETERS = (*DOTS, "size", "reached", "changed", *ONCE)
LAYERS = np.dtype(
    [
        *_columns("<U8", "reason"),
        *_columns("?", "partial", "knows_scales", "has_common", "has_attainable"),
        *_columns("<i8", "ranks", "total", "groups", "moved"),
        *_columns("<f8", "precision", "rule_error", "terms", "factor"),
        *_columns("<f8", *OF_PARAMETERS, "width", "silent"),
        *_columns("<f8", "gradient_factor", "active", "G_G", "concentration", "own_G", "own_own"),
        *_columns("<f8", "scale_sum", "scale_off", "scale_max", "attainable"),
        *_columns("<f8", "rows_bound", "other_share"),
    ]
)
_ROWS, _MOVES = names_of(PAIRS), names_of(REALISED)
TABLES = {
    "rows": [
        *_ROWS,
        *("scale", "mean", "off", "common", "square", "largest", "fourth", "zeros", "key"),
    ],
    "equations": ["of_bias", "number", "now", "h", "before"],
    "moves": [*_MOVES],
    "loads": ["number", "rows"],
    "own": ["number", "rows", "value"],
}
KINDS = {"layers": LAYERS} | {
    table: np.dtype([*_columns("<i4", "layer"), *_columns("<f8", *names)])
    for table, names in TABLES.items()
}


def blank(table: str, shape: int | tuple[int, ...]) -> Table:
    """Return new lines of a table: products are 0, other numbers NaN."""
    line = np.zeros((), KINDS[table])
    for name in KINDS[table].names or ():
        if KINDS[table][name] == np.float64 and not (table == "rows" and name in _ROWS):
            line[name] = np.nan
    return np.full(shape, line)


def in_order(lines: Table) -> Table:
    """Return lines in the order of the layers; those of each layer keep theirs."""
    return lines[np.argsort(lines["layer"], kind="stable")]


@dataclass(frozen=True, slots=True)
class About:
    """Static properties of a layer.

    Attributes:
        kind: as in `LayerReading`.
        module: name of the module's class.
        features: number of features of a row, where a row is a vector that the weight multiplies.
        bias_alone: no weight is trained.
        undefined: measures that are not defined for such a layer.
        own: names of the measures of the user's own.
    """

    kind: str
    module: str = ""
    features: int | None = None
    bias_alone: bool = False
    undefined: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StepSums:
    """The numbers of all layers in a measured step.

    Attributes:
        paths: the layers.
        about: their static properties.
        layers: one line for each layer.

            - ranks: number of merged ranks.
            - total: number T of rows that received a gradient.
            - groups: number of scales of a row; 0: they are not known.
            - precision: rounding of the coarsest dtype that a gradient passed through.
            - rule_error: relative difference of the layer's output from the output by its rule.
            - gamma_gamma … a_gamma: dot products of vectors that hold all parameters of the layer,
              with γ the gradient, w = −u the negative of the optimizer's update, and a the negative
              of the update that was applied in the end. `partial`: this rank holds a part of the
              parameters; the ranks' numbers add up.
            - theta_theta, size, reached, changed: of the parameters before the step, ‖θ‖², their
              number, that of those with a gradient that is not zero, and of those among them that
              the step changed. once_gamma, once_w: parts of γγ and ww, so that each parameter
              counts for one layer alone. width: number of entries of z_r; silent: of those that
              have no gradient in any of the sampled rows.
            - factor: c in γ = c·GᵀΦ; NaN if unknown. gradient_factor: the same without the
              averaging over ranks by the backward passes.
            - reason: why γ is not the gradient of the rows, so that only the rows are used; "": it
              is.
            - other_share: what is not of the rows, over ‖γ‖: the gradient that was there before
              ("earlier"), or all that is no multiple of theirs ("more"); else 0.
            - terms: Σ_r ‖g_r φ_rᵀ‖, the sum of the norms of all terms of the gradient that the
              backward passes left, as far as the rows determine it.
            - active, G_G, concentration: of one pass over all rows, number of rows with a nonzero
              gradient, Σ ‖g_r‖² and Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)².
            - own_G, own_own: Σ s_r ‖g_r‖² and Σ s_r² ‖g_r‖² with the scales s_r. `knows_scales`:
              the pass summed the scales of active rows, too. scale_sum, scale_off and scale_max are
              Σ s_r, √Σ (s_r − mean)² and max s_r.
            - has_common: the features tell `common_share`.
            - attainable: `attainable_cosine`, over all rows.
            - moved: number of all rows on the probe; 0: the realised move is not known.
            - rows_bound: every row of this rank with a smaller key is in the sample.

        rows: the sampled rows. The dot products `a_b` of their vectors; a vector that a layer lacks
            counts as zero. scale: ‖φ_r‖², the largest of several; mean, off: of several, their mean
            m and √Σ (s − m)². common: φ_r·Σ_k φ_k, with the sum over the sampled active rows.
            square: ‖φ_W‖². largest, fourth, zeros: of the entries, max |z_n|, Σ z_n⁴, and the
            number of g_n = 0. key: see `capture/sampling.py`.
        equations: γv, h of the rows, and γv of the gradient that was there before them, for the
            weight or the bias, whose equations are numbered; see `capture/check.py`.
        moves: dot products of rows on the probe, NaN with G if the loss is not known.
        loads: the number of an expert, and that of its rows, of all rows; one for each rank.
        own: the number of a measure of the user's own, that of the rows it got, and its value; one
            for each rank.
    """

    paths: tuple[str, ...]
    about: tuple[About, ...]
    layers: Table
    rows: Table
    equations: Table
    moves: Table
    loads: Table
    own: Table

    @property
    def tables(self) -> dict[str, Table]:
        """All tables but `layers`."""
        return {name: getattr(self, name) for name in TABLES}

    def lines(self, table: str) -> Index:
        """Return the number of lines of every layer."""
        found: Index = np.bincount(getattr(self, table)["layer"], minlength=len(self.paths))
        return found

    @cached_property
    def seen(self) -> Index:
        """R, number of sampled rows of every layer."""
        return self.lines("rows")

    @cached_property
    def active(self) -> Index:
        """Number of sampled rows with a nonzero gradient of every layer."""
        return self.total(self.rows["G_G"] != 0).astype(np.int64)

    @cached_property
    def checked(self) -> np.ndarray:
        """Whether there are equations of a layer."""
        return self.lines("equations") > 0

    @cached_property
    def tolerance(self) -> Array:
        """Largest difference by rounding of two equal sums, relative to their terms."""
        precision: Array = self.layers["precision"]
        # Matrix products of float32 may be computed with fewer digits (TensorFloat-32).
        return np.where(precision < 1e-15, 1e-9, np.maximum(1e-3, 4 * precision))

    @cached_property
    def rounding(self) -> Array:
        """Largest difference by rounding of two sums of the terms of γ, in any order.

        A gradient with a norm up to this may be rounding alone: that of an attention's key bias is
        zero in exact arithmetic. Nothing can be concluded from such a gradient.
        """
        # Coarser dtypes than float32 are summed in float32.
        finest = np.finfo(np.float32).eps
        found: Array = 4 * np.minimum(self.layers["precision"], finest) * self.layers["terms"]
        return found

    @property
    def was_zeroed(self) -> np.ndarray:
        """Whether the gradient was set to zero after the backward pass."""
        found: np.ndarray = (self.layers["gamma_gamma"] == 0) & (self.layers["terms"] > 0)
        return found

    def of(self, table: str, layer: int) -> Table:
        """Return a table's lines of one layer."""
        lines: Table = getattr(self, table)
        return lines[slice(*np.searchsorted(lines["layer"], (layer, layer + 1)))]

    def total(self, values: Array) -> Array:
        """Return the sum of every layer over values of its sampled rows."""
        return np.bincount(self.rows["layer"], values, len(self.paths)).astype(np.float64)

    def pick(self, layers: Index) -> "StepSums":
        """Return the sums of some layers, given in order."""
        place = np.full(len(self.paths), -1)
        place[layers] = np.arange(len(layers))
        kept = {}
        for name, lines in self.tables.items():
            lines = lines[place[lines["layer"]] >= 0]
            lines["layer"] = place[lines["layer"]]
            kept[name] = lines
        paths, about = (tuple(of[i] for i in layers) for of in (self.paths, self.about))
        return StepSums(paths, about, self.layers[layers], **kept)

    def in_units(self, factor: Array) -> "StepSums":
        """Return the sums with G in the units of the optimizer's gradient, from those of backward.

        Args:
            factor: ‖gradient the optimizer saw‖ / ‖gradient that backward left‖ of every layer; NaN
                if unknown.
        """
        layers, rows = self.layers.copy(), self.rows.copy()
        layers["factor"] = factor
        of_row, before = rows["layer"], self.rows
        c = np.where(np.isnan(factor), 1.0, factor)[of_row]
        for name in ("G_G", "own_G", "own_own"):
            layers[name] *= np.where(np.isnan(factor), 1.0, factor) ** 2
        is_one = (layers["groups"] == 1)[of_row]
        for (a, b), name in zip(PAIRS, _ROWS, strict=True):
            rows[name] *= c ** ((a in ("own", "G")) + (b in ("own", "G")))
        # e − D G depends on the units.
        own_e = np.where(is_one, before["scale"] * before["e_G"], before["own_e"])
        own_own = np.where(is_one, before["scale"] ** 2 * before["G_G"], before["own_own"])
        rest = np.maximum(before["e_e"] - 2 * c * own_e + c**2 * own_own, 0.0)
        is_new = (c != 1) & (layers["groups"] > 0)[of_row]
        rows["rest_rest"] = np.where(is_new, rest, rows["rest_rest"])
        return replace(self, layers=layers, rows=rows)


NO_SUMS = StepSums((), (), *(blank(table, 0) for table in KINDS))
