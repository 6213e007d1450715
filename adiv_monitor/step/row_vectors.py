"""The vectors that every row of a layer has, and all that is asked of them: products and scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures, Features
from adiv_monitor.kernels.choice import attempt
from adiv_monitor.maths import dots
from adiv_monitor.step.plain_step import Change, added


@dataclass
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


@dataclass
class RowProducts:
    """What is found of them.

    Attributes:
        vectors: the vectors' names; beside those of a step, "own" and "rest", e's parts by the
            row's own scale and by the other rows, and "bias", d's part by the bias.
        values: "products" (rows, k, k) of the vectors, and of a gain what its scales add up to.
        scale: (rows, groups); None: there is none.
        weight_norms: ‖φ_W‖ of every row, if that was looked at.
    """

    vectors: tuple[str, ...]
    values: dict[str, Tensor]
    scale: Tensor | None
    weight_norms: Tensor | None = None


def products_of(rows: RowVectors, features: Features) -> RowProducts:
    """All of it, by one kernel where that can."""
    return _fused(rows, features) or _plain(rows, features)


def _plain(rows: RowVectors, features: Features) -> RowProducts:
    G, e = rows.scaled(), added(*rows.e)
    vectors = {"G": G, "e": e, "z": rows.z}
    values: dict[str, Tensor] = {}
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
            vectors["rest"] = torch.addcmul(e, scale, G, value=-1)
        else:
            blocks = G.view(*scale.shape, G.shape[1] // scale.shape[1])
            vectors["own"] = (scale[..., None] * blocks).flatten(1)
            vectors["rest"] = e - vectors["own"]
            shifted = scale - scale[:1, :1]
            values["scale_sums"] = shifted.sum(1)
            values["scale_norms"] = torch.linalg.vector_norm(shifted, dim=1)
            values["scale_largest"] = scale.amax(1)
    if rows.d is not None:
        by_weight, by_bias = rows.d
        vectors["d"] = added(by_weight, by_bias)
        if by_weight is not None and by_bias is not None:
            vectors["bias"] = by_bias
    values["products"] = dots.of_rows(list(vectors.values()))
    return RowProducts(tuple(vectors), values, scale)


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
    vectors, values = found
    scale, lengths = values.pop("scales"), values.pop("lengths")
    return RowProducts(vectors, values, scale, lengths)
