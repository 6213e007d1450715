"""The corrected maps as pure functions of (input, weight, bias).

Notation of G. Bird, "The Affine Divergence" (arXiv 2512.22247): x is one row of the input, W and b
the weight and bias, s the row's divisor. A row's *scale* is ‖φ‖², φ being what multiplies [W | b]
in its output; under a plain gradient step the row moves by −η·scale times its own gradient. The
corrections make the scale the same for every row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.ops import unit_rows
from adiv_layers.output_scaling import output_scaled_linear, prefers_output_scaling


def affine_like_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Affine map divided by the length of its own features.

    z = (αWx + βb) / s, s = √(α²‖x‖² + β²) (eqns 15, 19, 37). With a bias the scale is exactly 1;
    without one it is α²‖x‖²/s², below 1.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        alpha: weight of Wx; not 0.
        beta: weight of b; not 0.

    Returns:
        (..., n_out). Zero rows give b.

    Raises:
        ValueError: alpha or beta is 0 or not finite.
    """
    offset, sign = affine_like_constants(alpha, beta)
    if prefers_output_scaling(input, weight):
        bias = _times(bias, sign * offset)
        return output_scaled_linear(input, weight, bias, offset * offset, sign, eps=1.0)
    unit, inverse = unit_rows(input, offset * offset)
    if sign < 0:
        unit = -unit
    output = F.linear(unit, weight)
    if bias is None:
        return output
    return _add_outer(output, inverse if offset == 1.0 else inverse * offset, bias)


def norm_like_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    eps: float = 1e-12,
) -> Tensor:
    """Affine map of the row's direction, its length thrown away.

    z = αWx/s + βb. For |β| < 1, s = √(α²‖x‖²/(1−β²)) (eqns 14, 35): scale 1 (1−β² without a bias).
    For |β| = 1, s = ‖x‖ (eqn 17): scale α²+β², 2 by default, hence half the learning rate.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        alpha: weight of Wx; not 0. For |β| < 1 only its sign matters, the size cancels.
        beta: weight of b, in [−1, 1].
        eps: shortest length to divide by.

    Returns:
        (..., n_out). Zero rows give βb.

    Raises:
        ValueError: alpha is 0 or not finite, beta is outside [−1, 1], or eps is not positive.
    """
    gain = norm_like_gain(alpha, beta)
    eps = representable(eps, input.dtype)
    if prefers_output_scaling(input, weight):
        output = output_scaled_linear(input, weight, None, 0.0, gain, eps)
        return output if bias is None else torch.add(output, bias, alpha=beta)
    unit, _ = unit_rows(input, 0.0, eps)
    if gain != 1.0:
        unit = unit * gain
    return F.linear(unit, weight, _times(bias, beta))


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """Rows of length one: x / max(‖x‖, eps), a normaliser without parameters.

    Args:
        input: any shape.
        dim: the dimension that holds a row.
        eps: shortest length to divide by.

    Returns:
        The input's shape. Zero rows stay zero.
    """
    eps = representable(eps, input.dtype)
    if dim in (-1, input.dim() - 1):
        return unit_rows(input, 0.0, eps=eps)[0]
    return unit_rows(input.movedim(dim, -1), 0.0, eps=eps)[0].movedim(-1, dim)


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
    conv = _CONVOLUTIONS[space]
    squares = patch_squares(input, weight, stride, padding, dilation, groups)
    if form == "affine-like":
        offset, sign = affine_like_constants(alpha, beta)
        inverse = torch.rsqrt(squares + offset * offset) * sign
        numerator = conv(
            input, weight, _times(bias, sign * offset), stride, padding, dilation, groups
        )
        return _scale_channels(numerator, inverse, groups, space)
    gain = norm_like_gain(alpha, beta)
    eps = representable(eps, input.dtype)
    inverse = torch.rsqrt(squares.clamp(min=eps * eps)) * gain
    numerator = conv(input, weight, None, stride, padding, dilation, groups)
    output = _scale_channels(numerator, inverse, groups, space)
    shift = _times(bias, beta)
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
    conv = _CONVOLUTIONS[weight.dim() - 2]
    # Autocast would round the squares to half precision, where large ones overflow.
    with torch.autocast(input.device.type, enabled=False):
        return conv(squares, box, None, stride, padding, dilation, groups)


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def affine_like_constants(alpha: float, beta: float) -> tuple[float, float]:
    """(αWx + βb)/√(α²‖x‖² + β²) = (sign·Wx + offset·b)/√(‖x‖² + offset²): offset and sign."""
    if not (math.isfinite(alpha) and math.isfinite(beta) and alpha != 0.0 and beta != 0.0):
        raise ValueError(
            f"affine-like: alpha={alpha}, beta={beta}; both must be finite and not 0. "
            "To do without the bias pass bias=None, or use the norm-like form."
        )
    return beta / abs(alpha), math.copysign(1.0, alpha)


def norm_like_gain(alpha: float, beta: float) -> float:
    """What multiplies W x/‖x‖ in the norm-like form: ±√(1−β²), or α where |β| = 1."""
    if not (math.isfinite(alpha) and alpha != 0.0 and abs(beta) <= 1.0):
        raise ValueError(
            f"norm-like: alpha={alpha}, beta={beta}; "
            "alpha must be finite and not 0, beta must be in [-1, 1]."
        )
    return alpha if abs(beta) == 1.0 else math.copysign(math.sqrt(1.0 - beta * beta), alpha)


def check_form(form: str, alpha: float, beta: float, eps: float) -> None:
    """Raise ValueError unless the structural form is known and its settings are in range."""
    if form == "affine-like":
        affine_like_constants(alpha, beta)
    elif form == "norm-like":
        norm_like_gain(alpha, beta)
        representable(eps, torch.float32)
    else:
        raise ValueError(f'form is {form!r}; must be "affine-like" or "norm-like".')


def representable(eps: float, dtype: torch.dtype) -> float:
    """The eps to use for a dtype: a shorter one would give infinite gradients in fp16."""
    if not eps > 0.0:
        raise ValueError(f"eps={eps}; must be positive, or zero rows have no finite gradient.")
    return max(eps, torch.finfo(dtype).tiny)


def _add_outer(output: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """Add column ⊗ row to the output; the backward is two matrix-vector products."""
    flat = output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(0)
    column, row = column.reshape(-1).to(output.dtype), row.to(output.dtype)
    return torch.addr(flat, column, row).view(output.shape)


def _scale_channels(output: Tensor, inverse: Tensor, groups: int, space: int) -> Tensor:
    """Multiply channels (…, n_out, *space) by their group's map (…, groups, *space)."""
    inverse = inverse.to(output.dtype)
    if groups == 1:
        return output * inverse
    grouped = torch.unflatten(output, -space - 1, (groups, -1))
    return (grouped * inverse.unsqueeze(-space - 1)).flatten(-space - 2, -space - 1)


def _times(bias: Tensor | None, factor: float) -> Tensor | None:
    return bias if bias is None or factor == 1.0 else bias * factor
