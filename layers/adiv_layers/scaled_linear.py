"""Linear maps of scaled rows, (Wx + b)·r or Wx·r + b: which way is cheapest, here and now.

Dividing the input touches every input five times in forward and backward, dividing the output
every input and every output four times: that is cheaper where n_in > 4 n_out. On the CPU both have
a backward by hand, because autograd's own would pass over the input ten times; it is the plain
expression that is differentiated where someone differentiates twice, compiles or transforms.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import autocast_dtype
from adiv_layers.forms import least_square
from adiv_layers.kernels.maps import Rows
from adiv_layers.ops import linear_plus_factor, scaled, unit_rows, usable


def scaled_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
) -> Tensor:
    """(Wx + b)·r with r = 1/√(‖x‖² + constant); Wx·r + b with r = 1/max(‖x‖, eps) for constant 0.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        constant: what is added to the squared length, at least 0.
        eps: shortest length to divide by, where constant is 0.

    Returns:
        (..., n_out).
    """
    # In fp16 Wx could overflow before it is divided.
    dtype = autocast_dtype(input) or input.dtype
    narrow = weight.shape[1] > 4 * weight.shape[0] and dtype != torch.float16
    if not usable(input, weight, bias) and _by_hand(input):
        function = _OutputScaled if narrow else _InputScaled
        output: Tensor = function.apply(input, weight, bias, constant, eps)
        return output
    if not narrow:
        return _scale_input(input, weight, bias, constant, eps)
    plain = partial(_scale_output, constant=constant, eps=eps)
    return scaled(Rows(), plain, input, weight, bias, constant, eps)


def _scale_input(
    input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
) -> Tensor:
    unit, inverse = unit_rows(input, constant, eps)
    if bias is None or constant == 0:
        return F.linear(unit, weight, bias)
    return linear_plus_factor(unit, inverse, weight, bias)


def _scale_output(
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


class _InputScaled(torch.autograd.Function):
    """Wx̂ + r·b, or Wx̂ + b for constant 0, of x̂ = r·x."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
    ) -> Tensor:
        inverse = _inverse_length(input, constant, eps)
        unit = input * inverse
        ctx.save_for_backward(input, weight, bias, inverse, unit)
        ctx.settings = constant, eps
        if bias is None or constant == 0:
            return F.linear(unit, weight, bias)
        return F.linear(unit, weight).addcmul_(inverse, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, inverse, unit = ctx.saved_tensors
        constant, eps = ctx.settings
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # someone differentiates twice: r must be seen to depend on x
            plain = partial(_scale_input, constant=constant, eps=eps)
            return *_differentiable(plain, (input, weight, bias), needed, grad), None, None
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needed[0]:
            grad_input = grad @ weight
            pull = torch.linalg.vecdot(grad_input, unit).unsqueeze(-1)
            if bias is not None and constant > 0:
                pull += inverse * (grad @ bias).unsqueeze(-1)
            pull = _where_r_varies(pull, inverse, constant, eps)
            grad_input.addcmul_(unit, pull, value=-1).mul_(inverse)
        if needed[1]:
            grad_weight = rows.t() @ unit.reshape(-1, unit.shape[-1])
        if needed[2]:
            grad_bias = rows.t() @ inverse.reshape(-1) if constant > 0 else rows.sum(0)
        return grad_input, grad_weight, grad_bias, None, None


class _OutputScaled(torch.autograd.Function):
    """(Wx + b)·r, or Wx·r + b for constant 0.

    It saves the product before its scaling, so that what comes after may overwrite the output.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, constant: float, eps: float
    ) -> Tensor:
        inverse = _inverse_length(input, constant, eps)
        product = F.linear(input, weight, bias if constant > 0 else None)
        ctx.save_for_backward(input, weight, bias, inverse, product)
        ctx.settings = constant, eps
        output: Tensor = product * inverse
        return output if bias is None or constant > 0 else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, inverse, product = ctx.saved_tensors
        constant, eps = ctx.settings
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            plain = partial(_scale_output, constant=constant, eps=eps)
            return *_differentiable(plain, (input, weight, bias), needed, grad), None, None
        scaled_grad = grad * inverse
        rows = scaled_grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needed[0]:
            pull = torch.linalg.vecdot(scaled_grad, product).unsqueeze(-1) * inverse.square()
            pull = _where_r_varies(pull, inverse, constant, eps)
            grad_input = (scaled_grad @ weight).addcmul_(input, pull, value=-1)
        if needed[1]:
            grad_weight = rows.t() @ input.reshape(-1, input.shape[-1])
        if needed[2]:
            grad_bias = (rows if constant > 0 else grad.reshape(-1, grad.shape[-1])).sum(0)
        return grad_input, grad_weight, grad_bias, None, None


def _inverse_length(input: Tensor, constant: float, eps: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
    if constant > 0:
        return (length * length + constant).rsqrt_()
    return length.clamp_min_(least_square(eps, length) ** 0.5).reciprocal_()


def _where_r_varies(pull: Tensor, inverse: Tensor, constant: float, eps: float) -> Tensor:
    """The pull of r on x; none where eps holds r."""
    if constant > 0:
        return pull
    limit = (1 - 1e-6) / least_square(eps, inverse) ** 0.5
    return pull.masked_fill(inverse >= limit, 0.0)


def _differentiable(
    plain: Callable[..., Tensor],
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of the plain expression, with a graph of their own."""
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    output = plain(*inputs)
    gradients = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return [next(gradients) if need else None for need in needed]
