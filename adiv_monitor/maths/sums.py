"""The record of one layer in a measured step, from the device to the readings.

Its numbers (type `T`) are tensors until the one transfer of a step, and float64 arrays afterwards.
Unknown fields are None. The records of several ranks are merged into a record of the same kind
(`step/merge_rows.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from adiv_monitor.features.rows import Index

Array = np.ndarray[Any, np.dtype[np.float64]]
T = TypeVar("T")

_FLOAT32 = float(np.finfo(np.float32).eps)


class Vector(str, Enum):
    """The vectors of a row whose dot products are computed, in their order.

    The part of e by the row's own scale (of rows with several scales), e the move by a plain
    gradient step, G = ∂L/∂z, d the move by the optimizer's step, the part of d by the bias, z the
    output, the part of e by the other rows, r the realised move of the step, and b = r − 2h (see
    `measures.first_order_error`).
    """

    OWN = "own"
    E = "e"
    G = "G"
    D = "d"
    BIAS = "bias"
    Z = "z"
    REST = "rest"
    MOVED = "r"
    BEYOND = "b"


Pairs = tuple[tuple[Vector, Vector], ...]


def _pairs(
    vectors: Sequence[Vector], chain: Sequence[Vector], *others: tuple[Vector, Vector]
) -> Pairs:
    """Return all squares of vectors, then neighbours in a chain that leads them, then others."""
    return (*((v, v) for v in vectors), *pairwise(chain), *others)


@cache
def pairs_of(vectors: tuple[Vector, ...]) -> Pairs:
    """Return the pairs of a row's vectors whose dot products measures need: see `LayerSums`."""
    own, e, G, d, bias, *_ = Vector
    chain = [v for v in (own, e, G, d, bias) if v in vectors]
    return _pairs(vectors, chain, *([(own, G)] if own in vectors else []))


# The vectors, and the pairs of them, whose dot products are in `LayerSums.realised`.
MOVES = (Vector.G, Vector.MOVED, Vector.D, Vector.BEYOND, Vector.Z)
REALISED = _pairs(MOVES, MOVES[:3])


@cache
def column_of(pairs: Pairs, a: Vector, b: Vector) -> int:
    """Return the column of a·b or b·a among the dot products of these pairs."""
    return pairs.index((a, b) if (a, b) in pairs else (b, a))


@dataclass(frozen=True, slots=True)
class About:
    """Static properties of a layer.

    Attributes:
        kind: as in `LayerReading`.
        module: name of the module's class.
        features: number of features of a row, where a row is a vector that the weight multiplies.
        bias_alone: no weight is trained.
        undefined: measures that are not defined for such a layer.
    """

    kind: str
    module: str = ""
    features: int | None = None
    bias_alone: bool = False
    undefined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sampled(Generic[T]):
    """The sampled rows of a layer and the number of all its rows.

    Attributes:
        seen: R, number of sampled rows.
        total: T, number of rows that received a gradient.
        keys: random key of each sampled row, if the sample is to become part of a larger one: see
            `capture/sampling.py`.
        bound: every row of this rank with a smaller key is in the sample.
    """

    seen: int
    total: int
    keys: T | None = None
    bound: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Blocks(Generic[T]):
    """The scales of rows that have several, one for each group of outputs.

    Attributes:
        groups: number of groups.
        pivot: p, a number near the scales, against cancellation.
        sums: Σ (s − p) of every row, over its groups.
        norms: √Σ (s − p)² of every row, over its groups.
        largest: largest scale of every row.
        entries: all scales, row by row, or some of them.
        entry_rows: the row of each of the entries; None if all scales are there.
    """

    groups: int
    pivot: T
    sums: T
    norms: T
    largest: T
    entries: T
    entry_rows: T | None = None

    def rows_of_entries(self, seen: int) -> Index:
        """Return the row of each entry, for `seen` sampled rows."""
        if self.entry_rows is not None:
            return np.asarray(self.entry_rows, np.int64)
        return np.arange(seen * self.groups) // self.groups


@dataclass(frozen=True, slots=True, eq=False)
class ScaleTotals(Generic[T]):
    """Sums over the scales s_r of all active rows.

    Attributes:
        sum: Σ s_r.
        deviation: √(Σ (s_r − mean)²).
        largest: max s_r.
        entries: scales of a random subset of the rows; NaN for zero-gradient rows.
    """

    sum: T
    deviation: T
    largest: T
    entries: T


@dataclass(frozen=True, slots=True, eq=False)
class Totals(Generic[T]):
    """Results of one pass over all rows, with G in the units that backward left.

    Attributes:
        active: number of rows with a nonzero gradient.
        G_G: Σ ‖g_r‖².
        concentration: Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)².
        own_G: Σ s_r ‖g_r‖².
        own_own: Σ s_r² ‖g_r‖².
        scales: sums over the scales.
    """

    active: T
    G_G: T
    concentration: T
    own_G: T | None = None
    own_own: T | None = None
    scales: ScaleTotals[T] | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts over the sampled rows of a rank, before some are left out.

    Attributes:
        active: number of active rows.
        seen: number of rows.
        squares: Σ ‖φ_W‖² of the active rows.
    """

    active: int
    seen: int
    squares: float


@dataclass(frozen=True, slots=True, eq=False)
class Common(Generic[T]):
    """Sums for `common_share`: how similar the features of the active rows are.

    Attributes:
        products: φ_r·Σ_k φ_k of every row, with the sum over the sampled active rows.
        norms: ‖φ_W‖ of every row.
        sum: Σ_k φ_k; None if no other rank needs it.
        counted: counts over the rows of the sum; None if these are the rows of the record.
    """

    products: T
    norms: T
    sum: T | None = None
    counted: Counted | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FamilySums(Generic[T]):
    """Numbers of the sampled rows of layers of one kind, stacked.

    Attributes:
        count: the number of layers.
        vectors: see `LayerSums`.
        scale: (layers, rows).
        blocks: stacked.
        common: the fields of `Common`, stacked or of one layer.
    """

    count: int
    vectors: tuple[Vector, ...]
    scale: T | None
    blocks: Blocks[T] | None
    common: tuple[T, T, T | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class StackedSums(Generic[T]):
    """Numbers of the sampled rows of layers whose vectors have the same shape.

    Attributes:
        paths: the layers; None: was lost.
        vectors: all vectors that some of them have.
        products: (pairs, layers, rows), the dot products of all pairs of these.
        parts: the numbers of consecutive layers.
    """

    paths: tuple[str | None, ...]
    vectors: tuple[Vector, ...]
    products: T
    parts: tuple[FamilySums[T], ...]


@dataclass(frozen=True, slots=True, eq=False)
class CeilingSums(Generic[T]):
    """Sums for `attainable_cosine` over the rows of one of several ranks.

    Attributes:
        gram: ΦᵀΦ.
        cross: ΦᵀG.
        square: ‖G‖².
    """

    gram: T
    cross: T
    square: T


@dataclass(frozen=True, slots=True)
class Dots(Generic[T]):
    """Dot products of vectors that hold all parameters of the layer.

    `a_b` is ⟨a, b⟩, with γ the gradient, w = −u the negative of the optimizer's update, and a the
    negative of the update that was applied in the end. None: not computed.

    Attributes:
        gamma_gamma: ‖γ‖².
        w_w: ‖w‖².
        w_gamma: ⟨w, γ⟩.
        a_a: ‖a‖².
        a_w: ⟨a, w⟩.
        a_gamma: ⟨a, γ⟩.
        partial: this rank holds a part of the parameters; the ranks' numbers add up.
    """

    gamma_gamma: T
    w_w: T | None = None
    w_gamma: T | None = None
    a_a: T | None = None
    a_w: T | None = None
    a_gamma: T | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Evidence(Generic[T]):
    """Evidence on whether the layer's gradient γ is c·GᵀΦ of its rows, and the factor c.

    Attributes:
        precision: rounding of the coarsest dtype that a gradient passed through.
        reason: why γ is not the gradient of the rows, so that only the rows are used; "" if there
            is no such reason.
        terms: Σ_r ‖g_r φ_rᵀ‖, the sum of the norms of all terms of the gradient that the backward
            passes left, as far as the rows determine it.
        factor: c; NaN if unknown, None before it is determined.
        averaged: the part of the factor by which the backward passes average over ranks.
        of_weight: γv, h of the rows, and γv of the gradient that was there before them, if any, for
            the weight; see `capture/check.py`. Empty: not checked.
        of_bias: the same for the bias.
        e_by_rows: e is ΦΦᵀG, in the units of G.
        rule_error: relative difference of the layer's output from the output by its rule.
        replay_error: relative difference of a rerun call's output from the original.
    """

    precision: float
    reason: str = ""
    terms: float = 0.0
    factor: float | None = None
    averaged: float = 1.0
    of_weight: tuple[T, ...] = ()
    of_bias: tuple[T, ...] = ()
    e_by_rows: bool = False
    rule_error: T | None = None
    replay_error: T | None = None

    @property
    def is_checked(self) -> bool:
        """Whether there are equations."""
        return bool(self.of_weight or self.of_bias)

    @property
    def tolerance(self) -> float:
        """Largest difference by rounding of two equal sums, relative to their terms."""
        # Matrix products of float32 may be computed with fewer digits (TensorFloat-32).
        return 1e-9 if self.precision < 1e-15 else max(1e-3, 4 * self.precision)

    @property
    def rounding(self) -> float:
        """Largest difference by rounding of two sums of the same terms, in any order.

        A gradient with a norm up to this may be rounding alone: that of an attention's key bias is
        zero in exact arithmetic. Nothing can be concluded from such a gradient.
        """
        # Coarser dtypes than float32 are summed in float32.
        return 4 * min(self.precision, _FLOAT32) * self.terms


@dataclass(frozen=True, slots=True, eq=False)
class Moved(Generic[T]):
    """The realised move of a layer's rows on the probe.

    Attributes:
        total: number of all rows; some of them are sampled.
        products: (rows, 7), the dot products of `REALISED`; those with G are NaN if the probe's
            loss is not known.
    """

    total: int
    products: T


@dataclass(frozen=True, slots=True, eq=False)
class LayerSums(Generic[T]):
    """The record of one layer in a measured step.

    Attributes:
        about: static properties of the layer.
        sampled: the sampled rows, and the number of all rows.
        vectors: the vectors whose dot products are in `products`.
        products: (rows, pairs), the dot products of `pairs_of(vectors)`.
        evidence: whether the parameters' gradient is that of the rows.
        parameters: the parameters' dot products; None on the device, where they are by parameter.
        scale: ‖φ_r‖² of rows that have one scale.
        blocks: the scales of rows that have several; if `scale` is None too, there is no scale.
        totals: sums over all rows; None on the device, where those of alike layers are stacked.
        common: sums for `common_share`.
        realised: the realised move on the probe; None: not known.
        attainable: `attainable_cosine`, over all rows.
        ceiling: sums for `attainable_cosine`, of one of several ranks.
    """

    about: About
    sampled: Sampled[T]
    vectors: tuple[Vector, ...]
    products: T
    evidence: Evidence[T]
    parameters: Dots[float] | None = None
    scale: T | None = None
    blocks: Blocks[T] | None = None
    totals: Totals[T] | None = None
    common: Common[T] | None = None
    realised: Moved[T] | None = None
    attainable: T | None = None
    ceiling: CeilingSums[T] | None = None

    @property
    def dots(self) -> Dots[float]:
        """The parameters' dot products, on the host."""
        assert self.parameters is not None
        return self.parameters


def of_rows(layer: LayerSums[Array], a: Vector, b: Vector) -> Array:
    """Return a_r·b_r of every sampled row of a layer that has this pair of vectors."""
    found: Array = layer.products[:, column_of(pairs_of(layer.vectors), a, b)]
    return found


def factor_of(layer: LayerSums[Array]) -> float:
    """Return the factor c in γ = c·GᵀΦ; NaN if unknown."""
    return math.nan if layer.evidence.factor is None else layer.evidence.factor
