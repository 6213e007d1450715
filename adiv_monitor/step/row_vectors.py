"""The vectors of every row of a layer, their products, and the scales of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import Features
from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import Vector, pairs_of
from adiv_monitor.step.plain_step import Change, added

_ORDER = tuple(Vector)


@dataclass(slots=True)
class RowVectors:
    """The vectors of the rows, each (rows, n_total).

    Attributes:
        G: ∂L/∂z, as the backward pass left it.
        factor: the factor from G to the units of the optimizer's gradient; None: 1.
        z: the outputs.
        e: the move of a plain gradient step, by weight and by bias; (None, None): not computed yet.
        d: the move of the optimizer's step, by weight and by bias; None: no step was taken.
    """

    G: Tensor
    factor: Tensor | None
    z: Tensor
    e: Change = (None, None)
    d: Change | None = None

    def scaled(self) -> Tensor:
        """Return G in the units of the gradient that the optimizer saw."""
        return self.G if self.factor is None else self.G * self.factor.to(self.G)


@dataclass(slots=True)
class RowProducts:
    """The numbers that follow from the vectors of rows.

    Attributes:
        vectors: the vectors, in the order of `Vector`.
        products: (rows, pairs), the dot products of `pairs_of(vectors)`.
        scale: (rows, groups), ‖φ‖² of every row and group; None: unknown.
        of_groups: (3, rows), of rows with several scales: their sum, norm and maximum (`Blocks`).
    """

    vectors: tuple[Vector, ...]
    products: Tensor
    scale: Tensor | None = None
    of_groups: Sequence[Tensor] | None = None


def products_of(rows: RowVectors, features: Features) -> RowProducts:
    """Compute the products and scales.

    Raises:
        ValueError: the scales of the features have the wrong shape or dtype.
    """
    G, e = rows.scaled(), added(*rows.e)
    vectors = {Vector.G: G, Vector.E: e, Vector.Z: rows.z}
    of_groups = None
    scale = features.scale()
    if scale is not None:
        if scale.shape != (len(G), features.groups) or not scale.is_floating_point():
            raise ValueError(
                f"the features' scale() gave {scale.dtype} of shape {tuple(scale.shape)}, expected "
                f"real numbers of shape (rows, groups) = {(len(G), features.groups)}: ‖φ‖² of "
                "every row"
            )
        scale = scale.to(G.dtype)
        if scale.shape[1] == 1:
            vectors[Vector.REST] = torch.addcmul(e, scale, G, value=-1)
        else:
            blocks = G.view(*scale.shape, G.shape[1] // scale.shape[1])
            own = vectors[Vector.OWN] = (scale[..., None] * blocks).flatten(1)
            vectors[Vector.REST] = e - own
            shifted = scale - scale[:1, :1]
            norms = torch.linalg.vector_norm(shifted, dim=1)
            of_groups = shifted.sum(1), norms, scale.amax(1)
    if rows.d is not None:
        by_weight, by_bias = rows.d
        vectors[Vector.D] = added(by_weight, by_bias)
        if by_weight is not None and by_bias is not None:
            vectors[Vector.BIAS] = by_bias
    ordered = {vector: vectors[vector] for vector in _ORDER if vector in vectors}
    named = tuple(ordered)
    return RowProducts(named, dots.of_rows(ordered, pairs_of(named)), scale, of_groups)
