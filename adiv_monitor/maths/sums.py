"""The record of one layer in a measured step, from the device to the readings.

Its numbers are tensors until the one transfer of a step, and float64 arrays afterwards: `T` is
which. Parts of it are missing (None) where nothing told them. What several ranks know of a
layer is put together into the same record (`step/merge_rows.py`).
"""

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Generic, TypeVar

import numpy as np

from adiv_monitor.features.rows import Index

Array = np.ndarray[Any, np.dtype[np.float64]]
T = TypeVar("T")

_FLOAT32 = float(np.finfo(np.float32).eps)


class Vector(str, Enum):
    """The vectors of a row whose dot products are taken, in their order.

    G = ∂L/∂z, e what a plain gradient step does, z the output, e's parts by the row's own scale (of
    rows with several scales) and by the other rows, d what the step did, and its part by the bias.
    """

    G = "G"
    E = "e"
    Z = "z"
    OWN = "own"
    REST = "rest"
    D = "d"
    BIAS = "bias"


class Moved(IntEnum):
    """The vectors of a row of which `realised` has the dot products, by their places.

    r is what a step really did, and b = r − 2h (see `measures.first_order_error`).
    """

    G = 0
    D = 1
    R = 2
    B = 3


@dataclass(frozen=True, slots=True)
class About:
    """What a layer is.

    Attributes:
        kind: as in `LayerReading`.
        module: name of its module's class.
        features: how many numbers of a row the weight multiplies, where a row is such a vector.
        bias_alone: no weight is trained.
        undefined: measures that such a layer does not have.
    """

    kind: str
    module: str = ""
    features: int | None = None
    bias_alone: bool = False
    undefined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """Rows that a group of ranks chose together, each of which keeps some.

    Attributes:
        first: rank of the first of these ranks.
        place: of this rank among them.
        count: how many they are; 1 where each has all of them.
        seen: rows that they look at, all together.
        total: rows that there are.
    """

    first: int
    place: int
    count: int
    seen: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Which rows are looked at, of how many.

    Attributes:
        seen: R, rows that were looked at.
        total: T, rows that received a gradient.
        keys: of each row that is seen, where it is to be part of a larger sample: see
            `capture/sampling.py`.
        bound: every row of this rank whose key is smaller is among them.
        partition: what the rows are part of, if they were dealt out.
    """

    seen: int
    total: int
    keys: Array | None = None
    bound: float = math.inf
    partition: Partition | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Blocks(Generic[T]):
    """The scales of rows that have several, one for each group of outputs.

    Attributes:
        groups: how many.
        pivot: p, a number near the scales, so that nothing cancels.
        sums: Σ (s − p) of every row, over its groups.
        norms: √Σ (s − p)² likewise.
        largest: of every row.
        entries: all scales, row by row, or some of them.
        entry_rows: of which row each of those is; None: all are there.
    """

    groups: int
    pivot: T
    sums: T
    norms: T
    largest: T
    entries: T
    entry_rows: Index | None = None

    def rows_of_entries(self, seen: int) -> Index:
        """Of which of so many rows each entry is."""
        if self.entry_rows is not None:
            return self.entry_rows
        return np.arange(seen * self.groups) // self.groups


@dataclass(frozen=True, slots=True, eq=False)
class Made(Generic[T]):
    """How a weight is made of parameters: see `step/weight_versions.py`.

    Attributes:
        deviations: for each way in which it was made, how far JJᵀ is from 1, and from diagonal.
        groups: of the weight; its rows have scales for every output besides.
    """

    deviations: T
    groups: int


@dataclass(frozen=True, slots=True, eq=False)
class ScaleTotals(Generic[T]):
    """Of the scales s_r of all active rows.

    Attributes:
        sum: Σ s_r.
        deviation: √(Σ (s_r − mean)²).
        largest: the largest.
        entries: the scales of some rows, chosen by chance; NaN of those without a gradient.
    """

    sum: T
    deviation: T
    largest: T
    entries: T


@dataclass(frozen=True, slots=True, eq=False)
class Totals(Generic[T]):
    """What one pass over all rows gave, with G in the units that backward left.

    Attributes:
        active: how many rows have a gradient.
        G_G: Σ ‖g_r‖².
        concentration: Σ ‖g_r‖⁴ / (Σ ‖g_r‖²)², where that is needed.
        own_G: Σ s_r ‖g_r‖², or what that is of rows with several scales.
        own_own: Σ s_r² ‖g_r‖² likewise.
        scales: of all of them.
        weight_squares: Σ ‖φ_W‖² over all rows.
        weight_sum: ‖Σ φ_W‖ over all rows; of one of several ranks, Σ φ_W.
    """

    active: T
    G_G: T
    concentration: T | None = None
    own_G: T | None = None
    own_own: T | None = None
    scales: ScaleTotals[T] | None = None
    weight_squares: T | None = None
    weight_sum: T | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Of the rows that a rank has seen, before some are left out.

    Attributes:
        active: how many have a gradient.
        seen: how many there are.
        squares: Σ ‖φ_W‖² of the active ones.
    """

    active: int
    seen: int
    squares: float


@dataclass(frozen=True, slots=True, eq=False)
class Common(Generic[T]):
    """How alike the features of the active rows are.

    Attributes:
        products: φ_r·Σ_k φ_k of every row, over the active rows that are seen.
        norms: ‖φ_W‖ of every row.
        sum: Σ_k φ_k; None: no other rank needs it.
        counted: of which rows that is; None: of all that are here.
    """

    products: T
    norms: T
    sum: T | None = None
    counted: Counted | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CeilingSums(Generic[T]):
    """Of the rows of one of several ranks, for `attainable_cosine`.

    Attributes:
        gram: ΦᵀΦ.
        cross: ΦᵀG.
        square: ‖G‖².
    """

    gram: T
    cross: T
    square: T


@dataclass(frozen=True, slots=True, eq=False)
class OwnDots(Generic[T]):
    """Of a layer whose parameters others use too: its own part γ′ of their gradient.

    In the units that backward left.

    Attributes:
        gamma: ⟨γ, γ′⟩.
        w: ⟨w, γ′⟩; None: no step was taken.
    """

    gamma: T
    w: T | None = None


@dataclass(frozen=True, slots=True)
class Dots(Generic[T]):
    """Dot products of vectors that hold all parameters of the layer.

    `a_b` is ⟨a, b⟩: γ the gradient, w = −u what the optimizer's step took away, a what was taken
    away in the end, negative too. None: that was not looked at.

    Attributes:
        gamma_gamma: ‖γ‖².
        w_w: ‖w‖²; likewise the others.
        w_gamma: as said.
        a_a: as said.
        a_w: as said.
        a_gamma: as said.
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
    """What tells whether the layer's gradient γ is c·GᵀΦ of its rows, and c.

    Attributes:
        precision: rounding of the coarsest number that a gradient went through.
        reason: why γ is not that of the rows, so that these speak alone; "" if nothing is known.
        followed: autograd told all that the rows' calls hand on to the parameters.
        terms: Σ_r ‖g_r φ_rᵀ‖, the sum of the lengths of all that adds up to the gradient which the
            backward passes left, as far as the rows tell.
        factor: c; None or NaN if unknown.
        averaged: what of the factor the backward passes took by themselves, over ranks.
        then: some entries of the first parameter's gradient, as the backward passes left it.
        now: by the place of a parameter in the layer, such entries as the optimizer sees them.
        contributed: likewise, what calls have contributed to those.
        since: the first parameter's now, and when the last pass was over; of parts that travel,
            the factor between them and what is no multiple, for each rank.
        foreign: ‖gradient‖ that was there before the rows'.
        probe: γv − Gᵀ(Φv) and γv, see `plain_step.probe`.
        rule_error: how far the layer's output is from what its rule says, relative to it.
        replay_error: how far a call that was run again is from what it gave, likewise.
    """

    precision: float
    reason: str = ""
    followed: bool = False
    terms: float = 0.0
    averaged: float = 1.0
    factor: T | None = None
    then: T | None = None
    now: tuple[T | None, ...] = ()
    contributed: tuple[T | None, ...] = ()
    since: T | None = None
    foreign: T | None = None
    probe: T | None = None
    rule_error: T | None = None
    replay_error: T | None = None

    @property
    def tolerance(self) -> float:
        """How far rounding may take two equal sums apart, relative to their terms."""
        # Matrix products of float32 may be taken with fewer digits (TensorFloat-32).
        return 1e-9 if self.precision < 1e-15 else max(1e-3, 4 * self.precision)

    @property
    def rounding(self) -> float:
        """How far rounding may take two sums of the same terms apart, in whatever order.

        A gradient that is no longer than this may be nothing else: that of an attention's key bias
        is zero in exact arithmetic. Nothing can be concluded from it.
        """
        # Coarser numbers than float32 are summed up in float32.
        return 4 * min(self.precision, _FLOAT32) * self.terms


@dataclass(frozen=True, slots=True, eq=False)
class LayerSums(Generic[T]):
    """What is known of one layer in a measured step.

    Attributes:
        about: what it is.
        rows: which of how many rows were looked at.
        vectors: those of which there are products.
        products: (rows, k, k), of every pair of them.
        evidence: whether the parameters speak for the rows.
        parameters: their dot products; None on the device, where they come by parameter.
        scale: ‖φ_r‖² of rows that have one scale.
        blocks: the scales of rows that have several; neither: there is none.
        totals: of all rows.
        common: how alike the rows are.
        asked_common: whether they were asked that.
        realised: (rows, 4, 4), the products of `Moved`.
        attainable: `attainable_cosine`, of all rows.
        ceiling: the sums for that, of one of several ranks.
        own: of a layer whose parameters others use too.
        made: of a layer whose weight is made of parameters.
    """

    about: About
    rows: Sampled
    vectors: tuple[Vector, ...]
    products: T
    evidence: Evidence[T]
    parameters: Dots[float] | None = None
    scale: T | None = None
    blocks: Blocks[T] | None = None
    totals: Totals[T] | None = None
    common: Common[T] | None = None
    asked_common: bool = False
    realised: T | None = None
    attainable: T | None = None
    ceiling: CeilingSums[T] | None = None
    own: OwnDots[T] | None = None
    made: Made[T] | None = None

    @property
    def dots(self) -> Dots[float]:
        """The parameters' dot products, on the host."""
        assert self.parameters is not None
        return self.parameters


def of_rows(layer: LayerSums[Array], a: Vector, b: Vector) -> Array:
    """a_r·b_r of every row of a layer, which has these vectors."""
    found: Array = layer.products[:, layer.vectors.index(a), layer.vectors.index(b)]
    return found


def factor_of(layer: LayerSums[Array]) -> float:
    """The factor c in γ = c·GᵀΦ; NaN if unknown."""
    return math.nan if layer.evidence.factor is None else float(layer.evidence.factor)
