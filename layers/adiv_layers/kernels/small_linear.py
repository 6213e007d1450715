"""The autograd function around the kernels for few rows and a small weight."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from adiv_layers.forms import Correction
from adiv_layers.kernels import small
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.plain import differentiable, usable_backward
from adiv_layers.kernels.rows import rows_of

# The largest weight for which launches cost more than its product.
_NUMBERS, _OUTPUTS = 2**18, 512


def is_small(x: Tensor, weight: Tensor) -> bool:
    """Return whether these kernels suit x (…, n_in) and weight, by shape and precision."""
    n_out, n_in = weight.shape
    return (
        x.numel() <= small.ROWS * n_in
        and n_out <= _OUTPUTS
        and n_out * n_in <= _NUMBERS
        and x.dtype != torch.float64
        and weight.dtype != torch.float64
    )


class SmallLinear(Function):
    """The function x, W, b → f·(Wx + shift·b), or f·Wx + shift·b if the constant is 0.

    plain: the same function as a differentiable expression of x, W and b. Under autocast operands
    are cast only where they are multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plain: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: Correction,
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute the output with one kernel, or two."""
        flat, weight_rows = rows_of(x), rows_of(weight)
        z = x.new_empty((*x.shape[:-1], len(weight)), dtype=dtype)
        y = torch.empty_like(z, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        b = None if bias is None else bias.contiguous()
        factor = small.small_forward(flat, weight_rows, b, z, y, form)
        ctx.save_for_backward(x, weight, bias, factor, y)
        ctx.settings = plain, form
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b, with one kernel."""
        x, weight, bias, factor, y = ctx.saved_tensors
        plain, form = ctx.settings
        needed = ctx.needs_input_grad[1:4]
        if usable_backward(g):
            made = [
                torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
                for t, need in zip((x, weight, bias), needed, strict=True)
            ]
            flat = g.reshape(-1, g.shape[-1])
            with suppress(KernelError):
                given = flat, rows_of(x), rows_of(weight), y, factor, *made
                small.small_backward(*given, form=form)
                return None, *made, None, None
        return None, *differentiable(plain, (x, weight, bias), needed, g), None, None
