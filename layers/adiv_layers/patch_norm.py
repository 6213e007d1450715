"""PatchNorm: convolutions that divide every patch by its own norm, in 1, 2 or 3 dimensions."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import without_autocast
from adiv_layers.forms import Correction, affine_like, check_form, least_square, norm_like, times
from adiv_layers.kernels.maps import Patches
from adiv_layers.ops import output_scaled

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def patch_norm_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    form: str = "affine-like",
    alpha: float = 1.0,
    beta: float = 1.0,
    eps: float = 1e-12,
) -> Tensor:
    """Apply a convolution that corrects every patch by its own norm, in 1, 2 or 3 dimensions.

    form "affine-like": z = (αW·patch + βb)/√(α²‖patch‖² + β²) (eqn 55), scale 1.
    form "norm-like": z = αW·patch/s + βb, s = ‖patch‖ (eqn 56) or √(α²‖patch‖²/(1−β²)), scale 2
    or 1. α, β and the scales are those of `affine_like_linear` and `norm_like_linear`.
    With groups, every group has its own patches. Padding with zeros does not change a norm; for
    other paddings pad the input first.

    Args:
        input: (batch, n_in, *space) or (n_in, *space).
        weight: (n_out, n_in / groups, *kernel); its dimensions choose 1d, 2d or 3d.
        bias: (n_out,).
        stride: as in `torch.nn.functional.conv2d`.
        padding: as in `torch.nn.functional.conv2d`.
        dilation: as in `torch.nn.functional.conv2d`.
        groups: as in `torch.nn.functional.conv2d`.
        form: "affine-like" or "norm-like".
        alpha: weight of W·patch.
        beta: weight of b.
        eps: smallest norm to divide by (norm-like).

    Returns:
        (batch, n_out, *space_out) or (n_out, *space_out).

    Raises:
        ValueError: the form is unknown, or alpha, beta or eps is out of range.
    """
    check_form(form, alpha, beta, eps)
    space = weight.dim() - 2
    stride, dilation = per_dimension(stride, space), per_dimension(dilation, space)
    input, padding = in_numbers(input, weight, padding, dilation)
    if form == "affine-like":
        correction = affine_like(alpha, beta)
    else:
        correction = norm_like(alpha, beta, eps, input.dtype)
    geometry = (stride, padding, dilation, groups)
    patches = Patches.of(weight, *geometry)
    plain = partial(_plain, geometry=geometry, form=correction)
    return output_scaled(patches, plain, input, weight, bias, correction)


def _plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, form: Correction
) -> Tensor:
    """Return f·(W·patch + shift·b), or f·W·patch + shift·b if the constant is 0."""
    space = weight.dim() - 2
    before, after = form.split(bias)
    numerator = CONVOLUTIONS[space](input, weight, before, *geometry)
    squares = patch_squares(input, weight, *geometry)
    if form.constant > 0:
        squares = squares + form.constant
    else:
        squares = squares.clamp_min(least_square(form.eps, squares.dtype))
    output = scale_channels(numerator, times(squares.rsqrt(), form.gain), geometry[-1], space)
    return output if after is None else output + after.to(output.dtype).view(-1, *[1] * space)


def patch_squares(
    input: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return the squared norm of every patch of a convolution, without unfolding the input.

    ‖patch‖² is a box filter of Σ_c x_c²: a convolution with ones, one channel per group.

    Args:
        input: (batch, n_in, *space) or (n_in, *space).
        weight: the convolution's weight; only its shape matters.
        stride: step between patches, per dimension.
        padding: zeros at either end, per dimension.
        dilation: spacing inside a patch, per dimension.
        groups: groups of channels, each with its own norm.

    Returns:
        (batch, groups, *space_out) or (groups, *space_out); fp32 for half-precision inputs.
    """
    channel_dim = 1 - weight.dim()
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    squares = torch.unflatten(wide.square(), channel_dim, (groups, weight.shape[1])).sum(
        channel_dim
    )
    # cuDNN may round float32 to TF32 by default, an error of 1e-3 of the norm; not so float64.
    exact = squares.double() if squares.is_cuda else squares
    box = torch.ones((groups, 1, *weight.shape[2:]), dtype=exact.dtype, device=exact.device)
    conv = CONVOLUTIONS[weight.dim() - 2]
    # Autocast would round the squares to half precision, where large ones overflow.
    with without_autocast(input):
        return conv(exact, box, None, stride, padding, dilation, groups).to(squares.dtype)


def scale_channels(output: Tensor, inverse: Tensor, groups: int, space: int) -> Tensor:
    """Multiply channels (…, n_out, *space) by their group's map (…, groups, *space)."""
    if groups == 1:
        return (output * inverse).to(output.dtype)
    grouped = torch.unflatten(output, -space - 1, (groups, -1))
    product = (grouped * inverse.unsqueeze(-space - 1)).to(output.dtype)
    return product.flatten(-space - 2, -space - 1)


def in_numbers(
    input: Tensor, weight: Tensor, padding: str | int | tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the padding in numbers; if "same" is uneven, pad the input instead."""
    space = len(dilation)
    if not isinstance(padding, str):
        return input, per_dimension(padding, space)
    if padding == "valid":
        return input, (0,) * space
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if all(total % 2 == 0 for total in totals):
        return input, tuple(total // 2 for total in totals)
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return F.pad(input, sides), (0,) * space


def per_dimension(value: int | tuple[int, ...], space: int) -> tuple[int, ...]:
    """Return a size for every spatial dimension."""
    return (value,) * space if isinstance(value, int) else tuple(value)
