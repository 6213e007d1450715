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
)
from adiv_layers.forms import affine_like_constants, norm_like_gain
from adiv_layers.modules import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.functions.conv import geometry_of, patch_squares, patches
from adiv_monitor.features.registry import register_features
from adiv_monitor.features.rows import Rows, to_compute_dtype
from adiv_monitor.features.whole import Whole, squares

PatchNorm = PatchNormConv1d | PatchNormConv2d | PatchNormConv3d


def _spatial_last(module: PatchNorm | GradientOnlyConv2d, tensor: Tensor) -> Tensor:
    return geometry_of(module).spatial_last(tensor)


def _whole_linear(module: AffineLikeLinear | NormLikeLinear, input: Tensor) -> Whole:
    """Return scales and feature sum of all rows: φ_W is the input's row times a factor."""
    x = to_compute_dtype(input.reshape(-1, input.shape[-1]))
    square = squares(x)
    if isinstance(module, AffineLikeLinear):
        of_weight, of_bias = _affine_factors(module, square)
    else:
        of_weight, of_bias = _norm_factors(module, square)
    return Whole(
        square * of_weight.square(),
        0.0 if module.bias is None else of_bias.square(),
        of_weight @ x,
    )


def _whole_patches(module: PatchNorm, input: Tensor) -> Whole | None:
    """Return the scales of all patches; the feature sum would take more than one pass."""
    if module.groups > 1:
        return None
    form = _affine_factors if module.form == "affine-like" else _norm_factors
    square = patch_squares(geometry_of(module), input).flatten()
    of_weight, of_bias = form(module, square)
    bias_square = 0.0 if module.bias is None else of_bias.square()
    return Whole(square * of_weight.square(), bias_square, None)


@register_features(AffineLikeLinear, kind="affine-like", whole=_whole_linear)
def affine_like(module: AffineLikeLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [αx, β]/√(α²‖x‖² + β²)."""
    return _affine_like(rows.take(input)[:, None], module, module.bias)


@register_features(NormLikeLinear, kind="norm-like", whole=_whole_linear)
def norm_like(module: NormLikeLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [x/‖x‖, 1], or [αx/s, β] with s = √(α²‖x‖²/(1 − β²))."""
    return _norm_like(rows.take(input)[:, None], module, module.bias)


@register_features(
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    kind="PatchNorm",
    layout=_spatial_last,
    whole=_whole_patches,
)
def patch_norm(module: PatchNorm, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ of `affine_like` or `norm_like` for the patch, group by group."""
    form = _affine_like if module.form == "affine-like" else _norm_like
    return form(patches(geometry_of(module), rows, input), module, module.bias)


def _affine_like(
    x: Tensor, module: AffineLikeLinear | PatchNorm, bias: Tensor | None
) -> DenseFeatures:
    of_weight, of_bias = _affine_factors(module, squares(x))
    return DenseFeatures(of_weight[..., None] * x, None if bias is None else of_bias)


def _norm_like(x: Tensor, module: NormLikeLinear | PatchNorm, bias: Tensor | None) -> DenseFeatures:
    of_weight, of_bias = _norm_factors(module, squares(x))
    return DenseFeatures(of_weight[..., None] * x, None if bias is None else of_bias[:, :1])


def _affine_factors(module: AffineLikeLinear | PatchNorm, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's factor α/s and bias feature β/s from ‖x‖²."""
    offset, sign = affine_like_constants(module.alpha, module.beta)
    reciprocal = (square + offset**2).rsqrt()
    return sign * reciprocal, offset * reciprocal


def _norm_factors(module: NormLikeLinear | PatchNorm, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's factor α/s and bias feature β of norm-like forms."""
    length = square.sqrt().clamp(min=module.eps)
    gain = norm_like_gain(module.alpha, module.beta) / length
    return gain, torch.full_like(square, module.beta)


@register_features(GradientOnlyLinear, kind="gradient-only")
def gradient_only_linear(module: GradientOnlyLinear, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ = [x, 1]; a row's part of the gradient is weighted so that M's diagonal is 1.

    The batch form mixes the rows: the diagonal of its M = ΦΦᵀ(ΦΦᵀ + λI)⁻¹ depends on all rows.
    """
    x = rows.take(input)[:, None]
    return _gradient_only(x, module, module.bias)


@register_features(GradientOnlyConv2d, kind="gradient-only", layout=_spatial_last)
def gradient_only_conv(module: GradientOnlyConv2d, rows: Rows, input: Tensor) -> DenseFeatures:
    """φ of `gradient_only_linear` for the patch, group by group."""
    return _gradient_only(patches(geometry_of(module), rows, input), module, module.bias)


def _gradient_only(
    x: Tensor, module: GradientOnlyLinear | GradientOnlyConv2d, bias: Tensor | None
) -> DenseFeatures:
    square = squares(x)
    ones = None if bias is None else 1.0
    if module.form == "batch":
        return DenseFeatures(x, ones, mixes_rows=True)
    if module.form == "proportional" and bias is not None:
        gain = 1 / (square + 1)
        return DenseFeatures(x, ones, weight_gain=gain, bias_gain=gain)
    share = 1.0 if bias is None else 0.5
    gain = share / square.clamp(min=module.eps**2)
    return DenseFeatures(x, ones, weight_gain=gain, bias_gain=torch.full_like(square, share))
