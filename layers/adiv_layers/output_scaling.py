"""(Wx + b)·r with r = 1/√(‖x‖² + constant), for outputs much narrower than the input.

`unit_rows` touches every input five times in forward and backward, scaling the output every input
and every output four times: cheaper where n_in > 4 n_out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.ops import unit_rows


def prefers_output_scaling(input: Tensor, weight: Tensor) -> bool:
    """Whether to scale the output: on the CPU, in full precision, for wide rows.

    Half precision keeps to unit rows: Wx can overflow there before it is scaled.
    """
    return (
        input.device.type == "cpu"
        and input.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and weight.shape[1] > 4 * weight.shape[0]
    )


def output_scaled_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, gain: float, eps: float
) -> Tensor:
    """Linear map whose output rows are multiplied by gain·r.

    r = 1/√(‖x‖² + constant), or 1/max(‖x‖, eps) where constant is 0.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        constant: what is added to the squared length, at least 0.
        gain: what multiplies every output.
        eps: shortest length to divide by, where constant is 0.

    Returns:
        (..., n_out).
    """
    if _traced_or_transformed():
        return _plain(input, weight, bias, constant, gain, eps)
    output: Tensor = _OutputScaledLinear.apply(input, weight, bias, constant, gain, eps)
    return output


def _plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, gain: float, eps: float
) -> Tensor:
    _, inverse = unit_rows(input, constant, eps)
    return F.linear(input, weight, bias) * (inverse * gain)


def _traced_or_transformed() -> bool:
    """Where only plain expressions will do: torch.compile, functorch, forward-mode derivatives."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


class _OutputScaledLinear(torch.autograd.Function):
    """The same with its backward by hand: autograd's own would pass over the input ten times."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constant: float,
        gain: float,
        eps: float,
    ) -> Tensor:
        length = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
        if constant > 0:
            inverse = (length * length + constant).rsqrt_()
        else:
            inverse = length.clamp_min_(eps).reciprocal_()
        output = F.linear(input, weight, bias).mul_(inverse * gain)
        ctx.save_for_backward(input, weight, bias, inverse, output)
        ctx.settings = constant, gain, eps
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, inverse, output = ctx.saved_tensors
        constant, gain, eps = ctx.settings
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # someone differentiates twice: r must be seen to depend on x
            return (*_differentiable(input, weight, bias, grad, ctx.settings, needed), *_NONE)
        scaled = grad * (inverse * gain)
        rows = scaled.reshape(-1, scaled.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needed[0]:
            pull = torch.linalg.vecdot(grad, output).unsqueeze(-1) * inverse.square()
            if constant == 0:  # r no longer depends on x where eps holds it
                pull = pull.masked_fill(inverse * eps >= 1, 0.0)
            grad_input = (scaled @ weight).addcmul_(input, pull, value=-1)
        if needed[1]:
            grad_weight = rows.t() @ input.reshape(-1, input.shape[-1])
        if needed[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias, *_NONE


_NONE = (None, None, None)  # constant, gain and eps have no gradient


def _differentiable(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    settings: tuple[float, float, float],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients once more, with a graph of their own."""
    parameters = zip((input, weight, bias), needed, strict=True)
    inputs = [tensor for tensor, wanted in parameters if wanted and tensor is not None]
    output = _plain(input, weight, bias, *settings)
    gradients = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
    return [next(gradients) if wanted else None for wanted in needed]
