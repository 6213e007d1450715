"""The vectors that every row of a layer has, and all that is asked of them: products and scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.kernels.choice import attempt
from adiv_monitor.maths import dots
from adiv_monitor.maths.sums import Vector
from adiv_monitor.step.plain_step import Change, added


@dataclass(slots=True)
class RowVectors:
    """(rows, n_total) each; what follows from them is made when all are there.

    Attributes:
        G: ∂L/∂z, as backward left it.
        factor: what that is to be multiplied by; None: 1.
        z: the output.
        e: what a plain gradient step does, by weight and bias.
        d: what the step did, likewise; None: no step was taken.
    """

    G: Tensor
    factor: Tensor | None
    z: Tensor
    e: Change
    d: Change | None = None

    def scaled(self) -> Tensor:
        """G in the units of the gradient that the optimizer saw."""
        return self.G if self.factor is None else self.G * self.factor.to(self.G)


@dataclass(slots=True)
class RowProducts:
    """What is found of them.

    Attributes:
        vectors: those of which there are products, in their order.
        products: (rows, k, k), of every pair of them.
        scale: (rows, groups); None: there is none.
        of_groups: (3, rows) of rows with several scales, see `Blocks`: their sums, norms, and
            the largest.
        weight_norms: ‖φ_W‖ of every row, if that was looked at.
    """

    vectors: tuple[Vector, ...]
    products: Tensor
    scale: Tensor | None = None
    of_groups: Sequence[Tensor] | None = None
    weight_norms: Tensor | None = None


def products_of(rows: RowVectors, features: Features) -> RowProducts:
    """All of it, by one kernel where that can.

    Raises:
        ValueError: the features' scales are of another shape than theirs.
    """
    return _fused(rows, features) or _plain(rows, features)


def _plain(rows: RowVectors, features: Features) -> RowProducts:
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
    found = dots.of_rows(list(vectors.values()))
    return RowProducts(tuple(vectors), found, scale, of_groups)


def _fused(rows: RowVectors, features: Features) -> RowProducts | None:
    if type(features) is not DenseFeatures or features.phi is None:  # a user's may differ
        return None
    special = features.mixes_rows or features.weight_gain is not None
    if special or isinstance(features.bias, Tensor) or features.bias_gain is not None:
        return None
    d = (None, None) if rows.d is None else rows.d
    if rows.e[0] is None or (rows.d is not None and d[0] is None):
        return None
    tensors = (features.phi, rows.G, rows.factor, *rows.e, rows.z, *d)
    found = attempt("row_products", *tensors, feature=features.bias or 0.0)
    if found is None:
        return None
    products, scale, lengths, of_groups = found
    own = () if of_groups is None else (Vector.OWN,)
    steps = [v for v, part in zip((Vector.D, Vector.BIAS), d, strict=True) if part is not None]
    vectors = (Vector.G, Vector.E, Vector.Z, *own, Vector.REST, *steps)
    return RowProducts(vectors, products, scale, of_groups, lengths)
