"""The corrected layers: scale 1 on every row (2 for norm-like with its default α = β = 1).

Structural forms (paper, eqns 17, 19, 55, 56) have shorter features. Gradient-only forms (eqns 20,
21) have the affine map's features, and a backward pass that weights the rows.
"""

import torch
from adiv_layers.convolutions import (
    GradientOnlyConv2d,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    padded,
)
from adiv_layers.forms import affine_like_constants, norm_like_gain
from adiv_layers.modules import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.functions.conv import geometry_of, patches
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows, squares

PatchNorm = PatchNormConv1d | PatchNormConv2d | PatchNormConv3d
Corrected = AffineLikeLinear | NormLikeLinear | PatchNorm
GradientOnly = GradientOnlyLinear | GradientOnlyConv2d


def _inputs(module: Corrected | GradientOnly, rows: Rows, input: Tensor) -> Tensor:
    """Return the inputs, or the patches, of the chosen rows (rows, groups, width)."""
    if not isinstance(module, PatchNorm | GradientOnlyConv2d):
        return rows.take(input)[:, None]
    input, padding = padded(module, input)
    how = module.stride, padding, module.dilation, module.groups
    return patches(geometry_of(module.weight, *how), input, rows)


def _spatial_last(module: PatchNorm | GradientOnlyConv2d, tensor: Tensor) -> Tensor:
    return tensor.movedim(-1 - len(module.kernel_size), -1)


@register_features(AffineLikeLinear, kind="affine-like")
@register_features(NormLikeLinear, kind="norm-like")
@register_features(
    PatchNormConv1d, PatchNormConv2d, PatchNormConv3d, kind="PatchNorm", layout=_spatial_last
)
def corrected(module: Corrected, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ of the form for the row, or for the patch group by group; see `_factors`."""
    x = _inputs(module, rows, input)
    of_weight, of_bias = _factors(module, squares(x))
    return DenseFeatures(of_weight[..., None] * x, None if module.bias is None else of_bias)


def _factors(module: Corrected, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's factor of x and bias feature from ‖x‖².

    Affine-like: φ = [αx, β]/√(α²‖x‖² + β²). Norm-like: φ = [x/‖x‖, 1], or [αx/s, β] with
    s = √(α²‖x‖²/(1 − β²)).
    """
    if isinstance(module, NormLikeLinear) or (
        isinstance(module, PatchNorm) and module.form == "norm-like"
    ):
        length = square.sqrt().clamp(min=module.eps)
        gain = norm_like_gain(module.alpha, module.beta) / length
        return gain, torch.full_like(square, module.beta)
    offset, sign = affine_like_constants(module.alpha, module.beta)
    reciprocal = (square + offset**2).rsqrt()
    return sign * reciprocal, offset * reciprocal


@register_features(GradientOnlyLinear, kind="gradient-only")
@register_features(GradientOnlyConv2d, kind="gradient-only", layout=_spatial_last)
def gradient_only(module: GradientOnly, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [x, 1]; a row's part of the gradient is weighted so that M's diagonal is 1.

    The batch form mixes the rows: the diagonal of its M = ΦΦᵀ(ΦΦᵀ + λI)⁻¹ depends on all rows.
    """
    x, bias = _inputs(module, rows, input), module.bias
    ones = None if bias is None else 1.0
    if module.form == "batch":
        return DenseFeatures(x, ones, mixes_rows=True)
    square = squares(x)
    if module.form == "proportional" and bias is not None:
        gain = 1 / (square + 1)
        return DenseFeatures(x, ones, weight_gain=gain, bias_gain=gain)
    share = 1.0 if bias is None else 0.5
    gain = share / square.clamp(min=module.eps**2)
    return DenseFeatures(x, ones, weight_gain=gain, bias_gain=torch.full_like(square, share))
