"""(Wx + b)·r with r = 1/√(‖x‖² + constant), for outputs much narrower than the input.

`unit_rows` touches every input five times in forward and backward, scaling the output every input
and every output four times: cheaper where n_in > 4 n_out.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import autocast_dtype
from adiv_layers.forms import least_square
from adiv_layers.kernels.maps import Rows
from adiv_layers.ops import scaled, unit_rows


def prefers_output_scaling(input: Tensor, weight: Tensor) -> bool:
    """Whether to scale the output: for wide rows, unless Wx could overflow before it is scaled."""
    dtype = autocast_dtype(input) or input.dtype
    return weight.shape[1] > 4 * weight.shape[0] and dtype != torch.float16


def output_scaled_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
) -> Tensor:
    """Linear map whose output rows are divided: (Wx + b)·r, or Wx·r + b where constant is 0.

    r = 1/√(‖x‖² + constant), or 1/max(‖x‖, eps) where constant is 0.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        constant: what is added to the squared length, at least 0.
        eps: shortest length to divide by, where constant is 0.

    Returns:
        (..., n_out).
    """
    if _by_hand(input):
        inner, outer = (bias, None) if constant > 0 else (None, bias)
        output: Tensor = _OutputScaledLinear.apply(input, weight, inner, constant, eps)
        return output if outer is None else output + outer
    plain = partial(_plain, constant=constant, eps=eps)
    return scaled(Rows(), plain, input, weight, bias, constant, eps)


def _plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
) -> Tensor:
    _, inverse = unit_rows(input, constant, eps)
    inner, outer = (bias, None) if constant > 0 else (None, bias)
    output = F.linear(input, weight, inner)
    output = (output * inverse).to(output.dtype)
    return output if outer is None else output + outer.to(output.dtype)


def _by_hand(input: Tensor) -> bool:
    """On the CPU in full precision; not where only plain expressions will do.

    Those are torch.compile and export, `torch.func` transforms and forward-mode derivatives.
    """
    return (
        input.device.type == "cpu"
        and input.dtype in (torch.float32, torch.float64)
        and autocast_dtype(input) is None
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


class _OutputScaledLinear(torch.autograd.Function):
    """(Wx + b)·r with its backward by hand: autograd's own would pass over the input ten times.

    It saves the output before its scaling, so that what comes after may overwrite the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constant: float,
        eps: float,
    ) -> Tensor:
        length = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
        if constant > 0:
            inverse = (length * length + constant).rsqrt_()
        else:
            inverse = length.clamp_min_(least_square(eps, length) ** 0.5).reciprocal_()
        numerator = F.linear(input, weight, bias)
        ctx.save_for_backward(input, weight, bias, inverse, numerator)
        ctx.settings = constant, eps
        output: Tensor = numerator * inverse
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, inverse, numerator = ctx.saved_tensors
        constant, eps = ctx.settings
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # someone differentiates twice: r must be seen to depend on x
            gradients = _differentiable(input, weight, bias, grad, ctx.settings, needed)
            return *gradients, None, None
        scaled_grad = grad * inverse
        rows = scaled_grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needed[0]:
            pull = (scaled_grad * numerator).sum(-1, keepdim=True) * inverse.square()
            if constant == 0:  # r no longer depends on x where eps holds it
                limit = (1 - 1e-6) / least_square(eps, inverse) ** 0.5
                pull = pull.masked_fill(inverse >= limit, 0.0)
            grad_input = (scaled_grad @ weight).addcmul_(input, pull, value=-1)
        if needed[1]:
            grad_weight = rows.t() @ input.reshape(-1, input.shape[-1])
        if needed[2]:
            grad_bias = rows.sum(0)
        return grad_input, grad_weight, grad_bias, None, None


def _differentiable(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    settings: tuple[float, float],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients once more, with a graph of their own."""
    parameters = zip((input, weight, bias), needed, strict=True)
    inputs = [tensor for tensor, wanted in parameters if wanted and tensor is not None]
    output = _plain(input, weight, bias, *settings)
    gradients = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
    return [next(gradients) if wanted else None for wanted in needed]
