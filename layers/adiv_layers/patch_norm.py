"""PatchNorm: convolutions that divide every patch by its own length, in 1, 2 or 3 dimensions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.forms import (
    affine_like_constants,
    check_form,
    norm_like_gain,
    representable,
    times,
)

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
    """Convolution that corrects every patch by its own length, in 1, 2 or 3 dimensions.

    form "affine-like": z = (αW·patch + βb)/√(α²‖patch‖² + β²) (eqn 55), scale 1.
    form "norm-like": z = αW·patch/s + βb, s = ‖patch‖ (eqn 56) or √(α²‖patch‖²/(1−β²)), scale 2
    or 1. α, β and the scales are those of `affine_like_linear` and `norm_like_linear`.
    With groups, every group has patches of its own. Padding with zeros adds nothing to a length;
    for other paddings pad the input first.

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
        eps: shortest length to divide by (norm-like).

    Returns:
        (batch, n_out, *space_out) or (n_out, *space_out).

    Raises:
        ValueError: unknown form, or alpha, beta or eps out of range.
    """
    check_form(form, alpha, beta, eps)
    space = weight.dim() - 2
    conv = CONVOLUTIONS[space]
    squares = patch_squares(input, weight, stride, padding, dilation, groups)
    if form == "affine-like":
        offset, sign = affine_like_constants(alpha, beta)
        inverse = torch.rsqrt(squares + offset * offset) * sign
        numerator = conv(
            input, weight, times(bias, sign * offset), stride, padding, dilation, groups
        )
        return scale_channels(numerator, inverse, groups, space)
    gain = norm_like_gain(alpha, beta)
    eps = representable(eps, input.dtype)
    inverse = torch.rsqrt(squares.clamp(min=eps * eps)) * gain
    numerator = conv(input, weight, None, stride, padding, dilation, groups)
    output = scale_channels(numerator, inverse, groups, space)
    shift = times(bias, beta)
    return output if shift is None else output + shift.to(output.dtype).view(-1, *[1] * space)


def patch_squares(
    input: Tensor,
    weight: Tensor,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Squared length of every patch a convolution looks at, without unfolding the input.

    ‖patch‖² is a box filter of Σ_c x_c²: a convolution with ones, one channel per group.

    Args:
        input: (batch, n_in, *space) or (n_in, *space).
        weight: the convolution's weight; only its shape matters.
        stride: as in `torch.nn.functional.conv2d`.
        padding: as in `torch.nn.functional.conv2d`.
        dilation: as in `torch.nn.functional.conv2d`.
        groups: as in `torch.nn.functional.conv2d`.

    Returns:
        (batch, groups, *space_out) or (groups, *space_out); fp32 for half-precision inputs.
    """
    channel_dim = 1 - weight.dim()
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    squares = torch.unflatten(wide.square(), channel_dim, (groups, weight.shape[1])).sum(
        channel_dim
    )
    box = torch.ones((groups, 1, *weight.shape[2:]), dtype=squares.dtype, device=squares.device)
    conv = CONVOLUTIONS[weight.dim() - 2]
    # Autocast would round the squares to half precision, where large ones overflow.
    with torch.autocast(input.device.type, enabled=False):
        return conv(squares, box, None, stride, padding, dilation, groups)


def scale_channels(output: Tensor, inverse: Tensor, groups: int, space: int) -> Tensor:
    """Multiply channels (…, n_out, *space) by their group's map (…, groups, *space)."""
    inverse = inverse.to(output.dtype)
    if groups == 1:
        return output * inverse
    grouped = torch.unflatten(output, -space - 1, (groups, -1))
    return (grouped * inverse.unsqueeze(-space - 1)).flatten(-space - 2, -space - 1)
