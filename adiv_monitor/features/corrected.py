"""The corrected layers: scale 1 on every row (2 for norm-like with its default α = β = 1).

Structural forms (paper, eqns 17, 19, 55, 56) have shorter features; gradient-only forms (eqns 20,
21) have the affine map's features, and a backward pass that weighs the rows.
"""

import torch
from adiv_layers.convolutions import (
    GradientOnlyConv2d,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)
from adiv_layers.forms import affine_like_constants, norm_like_gain
from adiv_layers.modules import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear
from torch import Tensor

from adiv_monitor.features.conv import patches, spatial_last
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows
from adiv_monitor.measures import row_dots

PatchNorm = PatchNormConv1d | PatchNormConv2d | PatchNormConv3d


@register_features(AffineLikeLinear, kind="affine-like")
def affine_like(module: AffineLikeLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [αx, β]/√(α²‖x‖² + β²)."""
    return _affine_like(rows.take(input)[:, None], module, module.bias)


@register_features(NormLikeLinear, kind="norm-like")
def norm_like(module: NormLikeLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [x/‖x‖, 1], or [αx/s, β] with s = √(α²‖x‖²/(1 − β²))."""
    return _norm_like(rows.take(input)[:, None], module, module.bias)


@register_features(
    PatchNormConv1d, PatchNormConv2d, PatchNormConv3d, kind="PatchNorm", layout=spatial_last
)
def patch_norm(module: PatchNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """The same of the patch, group by group."""
    form = _affine_like if module.form == "affine-like" else _norm_like
    return form(patches(module, rows, input), module, module.bias)


def _affine_like(
    x: Tensor, module: AffineLikeLinear | PatchNorm, bias: Tensor | None
) -> DenseFeatures:
    offset, sign = affine_like_constants(module.alpha, module.beta)
    reciprocal = (row_dots(x, x) + offset**2).rsqrt()
    features = sign * x * reciprocal[..., None]
    return DenseFeatures(features, None if bias is None else offset * reciprocal)


def _norm_like(x: Tensor, module: NormLikeLinear | PatchNorm, bias: Tensor | None) -> DenseFeatures:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=module.eps)
    features = norm_like_gain(module.alpha, module.beta) * x / length
    ones = x.new_full((len(x), 1), module.beta)
    return DenseFeatures(features, None if bias is None else ones)


@register_features(GradientOnlyLinear, kind="gradient-only")
def gradient_only_linear(module: GradientOnlyLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [x, 1]; a row's part of the gradient is weighed, so that M's diagonal is 1.

    The batch form mixes the rows: its M = ΦΦᵀ(ΦΦᵀ + λI)⁻¹ has no diagonal of single rows.
    """
    x = rows.take(input)[:, None]
    return _gradient_only(x, module, module.bias)


@register_features(GradientOnlyConv2d, kind="gradient-only", layout=spatial_last)
def gradient_only_conv(module: GradientOnlyConv2d, rows: Rows, input: Tensor) -> DenseFeatures:
    """The same of the patch, group by group."""
    return _gradient_only(patches(module, rows, input), module, module.bias)


def _gradient_only(
    x: Tensor, module: GradientOnlyLinear | GradientOnlyConv2d, bias: Tensor | None
) -> DenseFeatures:
    squares = row_dots(x, x)
    ones = None if bias is None else x.new_ones(len(x), 1)
    if module.form == "batch":
        return DenseFeatures(x, ones, mixes_rows=True)
    if module.form == "proportional" and bias is not None:
        gain = 1 / (squares + 1)
        return DenseFeatures(x, ones, weight_gain=gain, bias_gain=gain)
    share = 1.0 if bias is None else 0.5
    gain = share / squares.clamp(min=module.eps**2)
    return DenseFeatures(x, ones, weight_gain=gain, bias_gain=torch.full_like(squares, share))
