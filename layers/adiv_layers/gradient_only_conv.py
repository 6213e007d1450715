"""Gradient-only corrections of convolutions, where a row is a patch: see `gradient_only.py`."""

from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from adiv_layers.forms import representable
from adiv_layers.gradient_only import (
    as_autocast,
    check_gradient_form,
    flavour,
    row_factor,
    total,
)
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.maps import Patches
from adiv_layers.patch_norm import (
    CONVOLUTIONS,
    Geometry,
    in_numbers,
    patch_squares,
    per_dimension,
    scale_channels,
)

ConvForm = Literal["proportional", "disproportional"]
CONV_FORMS = get_args(ConvForm)


def gradient_only_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    form: ConvForm = "proportional",
    eps: float = 1e-12,
) -> Tensor:
    """Apply `torch.nn.functional.conv1d/2d/3d`, with corrected gradients of the parameters.

    A row is a patch, one per output position and group.

    Args:
        input: (batch, n_in, *space) or (n_in, *space).
        weight: (n_out, n_in / groups, *kernel); its dimensions choose 1d, 2d or 3d.
        bias: (n_out,).
        stride: as in `torch.nn.functional.conv2d`.
        padding: as in `torch.nn.functional.conv2d`.
        dilation: as in `torch.nn.functional.conv2d`.
        groups: as in `torch.nn.functional.conv2d`.
        form: "proportional" or "disproportional", see `gradient_only.py`.
        eps: smallest norm to divide by.

    Returns:
        (batch, n_out, *space_out) or (n_out, *space_out), exactly the result of torch's function.

    Raises:
        ValueError: the form is unknown, or eps is not positive.
    """
    check_gradient_form(form, CONV_FORMS, eps)
    space = weight.dim() - 2
    if input.dim() == space + 1:
        settings = (weight, bias, stride, padding, dilation, groups)
        return gradient_only_conv(input.unsqueeze(0), *settings, form=form, eps=eps).squeeze(0)
    input, weight, bias = as_autocast(input, weight, bias)
    dilation = per_dimension(dilation, space)
    input, padding = in_numbers(input, weight, padding, dilation)
    geometry = (per_dimension(stride, space), padding, dilation, groups)
    function = flavour(_GradientOnlyConv, _WithForwardMode, _AtOnce)
    output: Tensor = function.apply(input, weight, bias, geometry, form, eps)
    return output


class _GradientOnlyConv(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        form: str,
        eps: float,
    ) -> Tensor:
        return CONVOLUTIONS[weight.dim() - 2](input, weight, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.geometry, ctx.form, ctx.eps = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input, weight)
        ctx.save_for_forward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = _conv_backward(ctx.geometry, grad, input, weight, (True, False, False))
        if any(ctx.needs_input_grad[1:3]):
            grad_weight, grad_bias = _per_patch_gradients(
                input, weight, grad, ctx.geometry, ctx.form, ctx.has_bias, ctx.eps
            )
        return grad_input, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


class _WithForwardMode(_GradientOnlyConv):
    """`_GradientOnlyConv` with a forward mode, which torch.compile does not accept."""

    @staticmethod
    def jvp(
        ctx: Any, d_input: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None, *_: Any
    ) -> Tensor:
        input, weight = ctx.saved_tensors
        space = weight.dim() - 2
        conv = CONVOLUTIONS[space]
        parts = [
            None if d_input is None else conv(d_input, weight, None, *ctx.geometry),
            None if d_weight is None else conv(input, d_weight, None, *ctx.geometry),
            None if d_bias is None else d_bias.view(-1, *[1] * space),
        ]
        return total(parts)


class _AtOnce(torch.autograd.Function):
    """`_GradientOnlyConv` without a separate `setup_context`, for use without transforms."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        form: str,
        eps: float,
    ) -> Tensor:
        ctx.geometry, ctx.form, ctx.eps = geometry, form, eps
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input, weight)
        return CONVOLUTIONS[weight.dim() - 2](input, weight, bias, *geometry)

    backward = _GradientOnlyConv.backward


def _per_patch_gradients(
    input: Tensor,
    weight: Tensor,
    grad: Tensor,
    geometry: Geometry,
    form: str,
    has_bias: bool,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of weight and bias, with every patch's share multiplied by its factor."""
    eps, space = representable(eps, input.dtype), weight.dim() - 2
    stride, padding, dilation, groups = geometry
    patches = Patches(list(weight.shape[2:]), list(stride), list(padding), list(dilation), groups)
    kernels = None if torch.is_grad_enabled() else kernels_for(input, weight, grad)
    if kernels is not None and patches.suits(input, weight):
        with suppress(KernelError):
            found: tuple[Tensor, Tensor | None] = kernels.patch_gradients(
                patches, input, weight, grad, has_bias, form == "proportional", eps
            )
            return found
    squares = patch_squares(input, weight, *geometry)
    factor = row_factor(squares, form, has_bias, eps)
    scaled = scale_channels(grad, factor, groups, space)
    grad_weight = _conv_backward(geometry, scaled, input, weight, (False, True, False))
    positions = [0, *range(2, space + 2)]
    if form == "disproportional":
        return grad_weight, 0.5 * grad.sum(positions)
    return grad_weight, scaled.sum(positions)


def _conv_backward(
    geometry: Geometry, grad: Tensor, input: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
) -> Tensor:
    """Return the one gradient of a convolution that the mask selects."""
    stride, padding, dilation, groups = geometry
    no_output_padding = [0] * (weight.dim() - 2)
    gradients = torch.ops.aten.convolution_backward(
        grad, input, weight, None, stride, padding, dilation, False, no_output_padding, groups, mask
    )
    gradient: Tensor = gradients[mask.index(True)]
    return gradient
