"""Autograd functions around the kernels, and when to use them.

Each is to be used only where `usable` says so. Their backwards, too, turn to differentiable PyTorch
where someone differentiates twice or maps over gradients. None saves its output, so the layer may
be followed by an operation that overwrites it.
"""

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from adiv_layers.kernels import library
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.maps import Patches, Rows, columns

DEVICES = {"cuda"}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels can run on these tensors, here and now.

    Not under torch.compile, export or tracing, which want to see plain expressions; not under
    `torch.func` transforms or forward-mode derivatives, for which the kernels have no rule; not on
    subclasses (DTensor, fakes), whose data is not theirs to read.
    """
    present = [t for t in tensors if t is not None]
    device = present[0].device
    return (
        device.type in DEVICES
        and all(_plain(t) and t.device == device for t in present)
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()  # torch.jit.trace
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _importable()
    )


def _plain(x: Tensor) -> bool:
    """Whether this is a tensor that a kernel can read, and not an empty one."""
    return (type(x) is Tensor or type(x) is Parameter) and x.dtype in _DTYPES and x.numel() > 0


@functools.cache
def _importable() -> bool:
    """Whether there is a Triton to write kernels in; without one, said once, all is plain."""
    try:
        from adiv_layers.kernels import channels, patch, rows  # noqa: F401
    except Exception as cause:  # whatever is broken: the plain expressions still work
        warnings.warn(
            f"adiv_layers: no Triton kernels ({cause!r}); plain PyTorch is used instead.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _usable_backward(g: Tensor) -> bool:
    return not torch.is_grad_enabled() and usable(g)


def floor_of(eps: float, dtype: torch.dtype) -> float:
    """The least ‖x‖² to divide by: eps², kept above what would be flushed to zero."""
    return max(eps * eps, float(torch.finfo(library.accumulation_dtype(dtype)).tiny))


def _limit(floor: float, constant: float) -> float:
    """The r from which on ‖x‖² was that least one, so that r no longer depends on x; 0: none."""
    return 0.0 if constant > 0 else (1.0 - 1e-6) / math.sqrt(floor)


class UnitRows(Function):
    """x -> x̂, r; saves x and r, so that x̂ may be overwritten."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, constant: float, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """One read of x, one write of x̂."""
        floor = floor_of(eps, x.dtype)
        unit, factor = library.unit_rows(x, constant, floor, dtype, False)
        ctx.save_for_backward(x, factor)
        ctx.limit = _limit(floor, constant)
        ctx.set_materialize_grads(False)
        return unit, factor

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, gamma: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradient r(u − (u·x̂ + rγ)x̂) of x, from the gradients u of x̂ and γ of r."""
        x, factor = ctx.saved_tensors
        if u is None and gamma is None:
            return None, None, None, None
        if u is not None and _usable_backward(u):
            with suppress(KernelError):
                dx = library.unit_rows_backward(u, x, factor, gamma, ctx.limit, False, x.dtype)
                return dx, None, None, None
        unit = factor * x.to(factor.dtype)
        u = torch.zeros_like(unit) if u is None else u.to(factor.dtype)
        along = (u * unit).sum(-1, keepdim=True)
        if gamma is not None:
            along = along + factor * gamma
        if ctx.limit > 0:
            along = along.masked_fill(factor >= ctx.limit, 0.0)
        return (factor * (u - along * unit)).to(x.dtype), None, None, None


class AddFactor(Function):
    """x̂, r, W, b -> Wx̂ + r·b; after `UnitRows` it saves no activation of its own."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The matrix product, then r·b in place."""
        ctx.save_for_backward(unit, factor, weight, bias)
        output = F.linear(unit, weight)
        target = columns(output)
        library.add_(target, factor.view(1, 1, -1), bias.view(1, -1, 1).expand_as(target), 1.0)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients gW, g·b, gᵀx̂ and Σ r·g; the second and the fourth in one pass over g."""
        unit, factor, weight, bias = ctx.saved_tensors
        _, needs_gamma, _, needs_db = ctx.needs_input_grad
        du, dw = Rows().backward(g, unit, weight, ctx.needs_input_grad[::2])
        gamma = db = None
        if not (needs_gamma or needs_db):
            return du, None, dw, None
        if _usable_backward(g):
            upstream = columns(g)
            other = bias.view(1, -1, 1).expand_as(upstream) if needs_gamma else None
            with suppress(KernelError):
                _, gamma, db = library.gate(
                    upstream, factor.view(1, 1, -1), other, False, needs_db, False, 0.0, True
                )
        if gamma is None or db is None:
            gamma = (g * bias.to(factor.dtype)).sum(-1, keepdim=True)
            db = (g * factor).reshape(-1, g.shape[-1]).sum(0)
        gamma = gamma.reshape(factor.shape) if needs_gamma else None
        return du, gamma, dw, db.to(bias.dtype) if needs_db else None


class Scaled(Function):
    """x, W, b -> r∘(map of x + b), or r∘(map of x) + b where constant is 0.

    plain: the same as a differentiable expression of x, W and b.
    """

    @staticmethod
    def forward(
        ctx: Any,
        linear_map: Rows | Patches,
        plain: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constant: float,
        eps: float,
    ) -> Tensor:
        """The map, then one pass over its output."""
        floor = floor_of(eps, x.dtype)
        inner, outer = (bias, None) if constant > 0 else (None, bias)
        factor = linear_map.factor(x, constant, floor)
        y = linear_map.forward(x, weight, inner)
        output = y.new_empty_strided(y.shape, y.stride())
        library.scale_(linear_map.view(output), linear_map.view(y), factor, outer)
        ctx.save_for_backward(x, weight, bias, factor, y)
        ctx.settings = linear_map, plain, constant, _limit(floor, constant)
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the map at h = r·g, less what x does to r (eqn 33)."""
        x, weight, bias, factor, y = ctx.saved_tensors
        linear_map, plain, constant, limit = ctx.settings
        needed = ctx.needs_input_grad[2:5]
        # norm-like: the bias is added after the scaling, and its gradient sums g itself
        other, weighted = linear_map.view(y) if needed[0] else None, constant > 0
        if _usable_backward(g):
            with suppress(KernelError):
                upstream = linear_map.view(g)
                h, c, db = library.gate(
                    upstream, factor, other, True, needed[2], True, limit, weighted
                )
                dx, dw = linear_map.backward(linear_map.restore(h, y), x, weight, needed[:2])
                if dx is not None:
                    spread = linear_map.spread(c, x)
                    library.add_(linear_map.view(dx), spread, linear_map.view(x), -1.0)
                return None, None, dx, dw, db.to(bias.dtype) if needed[2] else None, None, None
        return None, None, *_differentiable(plain, (x, weight, bias), needed, g), None, None


def _differentiable(
    plain: Callable[..., Tensor],
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    g: Tensor,
) -> list[Tensor | None]:
    """The gradients of a plain expression, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        output = plain(*inputs)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    gradients = iter(torch.autograd.grad(output, wanted, g, create_graph=again))
    return [next(gradients) if need else None for need in needed]
