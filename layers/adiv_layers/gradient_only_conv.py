"""Gradient-only corrections of convolutions, where a row is a patch: see `gradient_only.py`."""

from contextlib import suppress
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from adiv_layers.forms import representable
from adiv_layers.gradient_only import check_gradient_form, gradient_only, row_factor
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
    dilation = per_dimension(dilation, space)
    input, padding = in_numbers(input, weight, padding, dilation)
    geometry = (per_dimension(stride, space), padding, dilation, groups)
    return gradient_only(input, weight, bias, _Convolution(geometry, form, eps))


class _Convolution(NamedTuple):
    """A convolution, with its corrected gradients."""

    geometry: Geometry
    form: str
    eps: float

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return CONVOLUTIONS[weight.dim() - 2](input, weight, bias, *self.geometry)

    def input_gradient(self, grad: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        gradient = Patches.of(weight, *self.geometry).backward(grad, input, weight, (True, False))[
            0
        ]
        assert gradient is not None
        return gradient

    def parameter_gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return gradients of weight and bias, each patch's share multiplied by its factor."""
        form, eps, space = self.form, representable(self.eps, input.dtype), weight.dim() - 2
        patches = Patches.of(weight, *self.geometry)
        kernels = None if torch.is_grad_enabled() else kernels_for(input, weight, grad)
        if kernels is not None and patches.suits(input, weight):
            with suppress(KernelError):
                found: tuple[Tensor, Tensor | None] = kernels.patch_gradients(
                    patches, input, weight, grad, has_bias, form == "proportional", eps
                )
                return found
        squares = patch_squares(input, weight, *self.geometry)
        factor = row_factor(squares, form, has_bias, eps)
        scaled = scale_channels(grad, factor, patches.groups, space)
        _, grad_weight = patches.backward(scaled, input, weight, (False, True))
        assert grad_weight is not None
        positions = [0, *range(2, space + 2)]
        if form == "disproportional":
            return grad_weight, 0.5 * grad.sum(positions)
        return grad_weight, scaled.sum(positions)
