"""Linear maps of scaled rows, f·(Wx + b) or f·Wx + b, computed in the cheapest way.

Dividing the input accesses every input five times in forward and backward; dividing the output,
which only kernels do, accesses every input and every output four times. On the CPU the backward is
hand-written, because autograd's would pass over the input ten times. The plain expression is used
for derivatives of derivatives, compilation and transforms.
"""

from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import autocast_dtype
from adiv_layers.forms import Correction, least_square, times
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.maps import Rows
from adiv_layers.kernels.plain import differentiable
from adiv_layers.ops import linear_dtype, unit_rows


def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None, form: Correction) -> Tensor:
    """Return f·(Wx + shift·b), or f·Wx + shift·b if the constant is 0: see `Correction`.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        form: definition of f and shift.

    Returns:
        (..., n_out).
    """
    kernels = kernels_for(input, weight, bias)
    if kernels is not None:
        try:
            return _by_kernels(kernels, input, weight, bias, form)
        except KernelError:
            return scale_input(input, weight, bias, form)
    if _by_hand(input):
        output: Tensor = _InputScaled.apply(input, weight, bias, form)
        return output
    return scale_input(input, weight, bias, form)


def _by_kernels(
    kernels: Any, input: Tensor, weight: Tensor, bias: Tensor | None, form: Correction
) -> Tensor:
    dtype = linear_dtype(input)
    inside = bias is not None and form.constant > 0
    by_output = _by_output(input.shape, weight.shape, dtype, inside)
    z: Tensor
    same = dtype != input.dtype or input.dtype == weight.dtype  # else F.linear is to raise
    if same and kernels.is_small(input, weight):
        plain = partial(scale_output if by_output else scale_input, form=form)
        z = kernels.SmallLinear.apply(plain, input, weight, bias, form, dtype)
    elif by_output:
        plain = partial(scale_output, form=form)
        z = kernels.output_scaled(Rows(), plain, input, weight, bias, form, dtype)
    else:
        z = kernels.input_scaled(input, weight, bias, form, dtype)
    return z


@lru_cache
def _by_output(input: torch.Size, weight: torch.Size, dtype: torch.dtype, inside: bool) -> bool:
    """Return whether dividing the output is cheaper: if n_in > 4 n_out, see the module's docstring.

    With fewer rows than inputs, adding f·b after the product takes two more passes over the output;
    then n_in > 2 n_out suffices.
    """
    n_out, n_in = weight
    if dtype == torch.float16:
        return False  # Wx could overflow before it is divided
    return n_in > (2 if inside and input.numel() < n_in * n_in else 4) * n_out


def scale_input(input: Tensor, weight: Tensor, bias: Tensor | None, form: Correction) -> Tensor:
    """Return W·x̂ + f·shift·b, or W·x̂ + shift·b if the constant is 0, as a plain expression."""
    unit, factor = unit_rows(input, form)
    if bias is None or form.constant == 0:
        return F.linear(unit, weight, times(bias, form.shift))
    output = F.linear(unit, weight)
    flat = output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(0)
    column = times(factor, form.shift).reshape(-1)
    return torch.addr(flat, column.to(output.dtype), bias.to(output.dtype)).view(output.shape)


def scale_output(input: Tensor, weight: Tensor, bias: Tensor | None, form: Correction) -> Tensor:
    """Return f·(Wx + shift·b), or f·Wx + shift·b if the constant is 0, as a plain expression."""
    _, factor = unit_rows(input, form)
    before, after = form.split(bias)
    output = F.linear(input, weight, before)
    output = (output * factor).to(output.dtype)
    return output if after is None else output + after.to(output.dtype)


def _by_hand(input: Tensor) -> bool:
    """Return whether to use the hand-written backward: on the CPU in full precision.

    Excluded are torch.compile and export, `torch.func` transforms and forward-mode derivatives,
    which need plain expressions.
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
    """Wx̂ + f·shift·b, or Wx̂ + shift·b if the constant is 0, with x̂ = f·x."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, form: Correction
    ) -> Tensor:
        factor = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
        if form.constant > 0:
            factor = (factor * factor + form.constant).rsqrt_()
        else:
            factor = factor.clamp_min_(least_square(form.eps, factor.dtype) ** 0.5).reciprocal_()
        factor = times(factor, form.gain)
        unit = input * factor
        ctx.save_for_backward(input, weight, bias, factor, unit)
        ctx.form = form
        if bias is None or form.constant == 0:
            return F.linear(unit, weight, times(bias, form.shift))
        return F.linear(unit, weight).addcmul_(factor, bias, value=form.shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, factor, unit = ctx.saved_tensors
        form, needed = ctx.form, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # double differentiation: f must depend on x in the graph
            plain = partial(scale_input, form=form)
            return *differentiable(plain, (input, weight, bias), needed, grad), None
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if needed[0]:
            grad_input = grad @ weight
            pull = torch.linalg.vecdot(grad_input, unit).unsqueeze(-1)
            if bias is not None and form.constant > 0:
                pull.addcmul_(factor, (grad @ bias).unsqueeze(-1), value=form.shift)
            limit = form.limit(factor.dtype)
            if limit > 0:  # where eps determines f, it does not vary with x
                pull = pull.masked_fill(factor.abs() >= limit, 0.0)
            grad_input.addcmul_(unit, pull, value=-1 / form.gain**2).mul_(factor)
        if needed[1]:
            grad_weight = rows.t() @ unit.reshape(-1, unit.shape[-1])
        if needed[2]:
            total = rows.t() @ factor.reshape(-1) if form.constant > 0 else rows.sum(0)
            grad_bias = times(total, form.shift)
        return grad_input, grad_weight, grad_bias, None
