"""Autograd functions around the kernels, for tensors that `choice.kernels_for` accepts.

Their backwards use differentiable PyTorch for derivatives of derivatives, for batched gradients,
and if a kernel does not start. None of them saves its output, unless only another of these
functions uses it, so the operation after a layer may overwrite the layer's output.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from adiv_layers.forms import Correction, accumulation_dtype, times
from adiv_layers.kernels import channels, rows
from adiv_layers.kernels.gradients import patch_gradients, row_gradients, scaled_gradient
from adiv_layers.kernels.launch import KernelError, alike, divide_up
from adiv_layers.kernels.maps import Patches, Rows, columns, spread
from adiv_layers.kernels.plain import differentiable, usable_backward
from adiv_layers.kernels.small_linear import SmallLinear, is_small

__all__ = [
    "InputScaled",
    "OutputScaled",
    "SmallLinear",
    "UnitRows",
    "input_scaled",
    "is_small",
    "output_scaled",
    "patch_gradients",
    "row_gradients",
]


class UnitRows(Function):
    """The function x → x̂ = f·x, f; it saves x and f, so that x̂ may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Correction, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute x̂ and f, with one read of x and one write of x̂."""
        unit = x.new_empty(x.shape, dtype=dtype)
        factor = x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
        rows.unit_rows(rows.rows_of(x), factor, unit.view(-1, x.shape[-1]), form=form)
        ctx.save_for_backward(x, factor)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return unit, factor

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, gamma: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x from the gradients u of x̂ and γ of f, see `_through_unit`."""
        x, factor = ctx.saved_tensors
        if u is None and gamma is None:
            return None, None, None
        if u is not None and usable_backward(u):
            dx = u.new_empty(u.shape, dtype=x.dtype)
            with suppress(KernelError):
                terms = None if gamma is None else gamma.reshape(1, -1).contiguous()
                given = rows.rows_of(u), rows.rows_of(x), factor, terms, dx
                rows.unit_rows_backward(*given, form=ctx.form, is_unit=False)
                return dx, None, None
        unit = factor * x.to(factor.dtype)
        return _through_unit(u, gamma, unit, factor, ctx.form).to(x.dtype), None, None


class InputScaled(Function):
    """The function x, W, b → z = Wx̂ + f·shift·b, or Wx̂ + shift·b if the constant is 0; x̂ and f.

    x̂ and f are outputs only for derivatives of derivatives: the function saves them, and as
    outputs they depend on x in the graph, which itself need not be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: Correction,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute x̂ in one pass, then one product, in which b may be one more column."""
        flat = rows.rows_of(x)
        count, width = flat.shape
        inside = bias if form.constant > 0 else None
        # [x̂, f·shift] · [W, b] costs a copy of W; adding f·shift·b costs a pass over z.
        column = inside is not None and count >= width
        room = 8 * divide_up(width + 1, 8) if column else width
        whole = flat.new_empty((count, room), dtype=dtype)
        factor = flat.new_empty((1, 1, count), dtype=accumulation_dtype(x.dtype))
        # All tensors within have sizes and places in memory that follow from these.
        like = alike(x, weight, bias), dtype, form
        rows.unit_rows(
            flat, factor, whole, like=like, form=form, column=form.shift if column else 0.0
        )
        unit = whole[:, :width] if column else whole
        if inside is None:
            z = F.linear(unit, weight, times(bias, form.shift))
        elif column:
            packed = weight.new_empty((weight.shape[0], room))
            rows.pack(rows.rows_of(weight), inside.contiguous(), packed, like=like)
            z = F.linear(whole, packed)
        else:
            z = F.linear(unit, weight)
            target = columns(z)
            other = spread(inside, target)
            channels.blend(target, target, factor, other, None, like=like, gain=form.shift)
        ctx.save_for_backward(unit, factor, weight, bias)
        ctx.form, ctx.shape, ctx.dtype, ctx.like = form, x.shape, x.dtype, like
        ctx.set_materialize_grads(False)
        return z if x.dim() == 2 else z.view(*x.shape[:-1], -1), unit, factor

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, u: Tensor | None, gamma: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b; γ and that of b are computed in one pass over g."""
        unit, factor, weight, bias = ctx.saved_tensors
        form, needed = ctx.form, ctx.needs_input_grad[:3]
        flat = None if g is None else g.reshape(-1, g.shape[-1]) if g.dim() != 2 else g
        if flat is not None and u is None and gamma is None and usable_backward(flat):
            with suppress(KernelError):
                given = unit, factor, weight, bias, form, needed, ctx.dtype, ctx.like
                dx, dw, db = _input_scaled_backward(flat, *given)
                return dx if dx is None else dx.view(ctx.shape), dw, db, None, None
        dx = dw = db = None
        inside, factor = form.constant > 0, factor.view(-1, 1)
        gamma = gamma if gamma is None else gamma.view(-1, 1)
        if flat is not None:
            if needed[0]:
                u = flat @ weight if u is None else u + flat @ weight
                if bias is not None and inside:
                    along = form.shift * (flat * bias.to(factor.dtype)).sum(-1, keepdim=True)
                    gamma = along if gamma is None else gamma + along
            if needed[1]:
                dw = flat.t() @ unit
            if needed[2] and bias is not None:
                db = form.shift * (flat * factor if inside else flat).sum(0).to(bias.dtype)
        if needed[0] and not (u is None and gamma is None):
            dx = _through_unit(u, gamma, unit.to(factor.dtype), factor, form).to(ctx.dtype)
            dx = dx.view(ctx.shape)
        return dx, dw, db, None, None


def _input_scaled_backward(
    flat: Tensor,
    unit: Tensor,
    factor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Correction,
    needed: tuple[bool, ...],
    dtype: torch.dtype,
    forward: Hashable,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x (rows, n_in), W and b by kernels; forward: its tensors' `alike`."""
    dx = dw = db = dots = None
    like = forward, alike(flat), needed
    if bias is not None and form.constant > 0:
        if needed[0] or needed[2]:
            upstream = columns(flat)
            other = spread(bias, upstream) if needed[0] else None
            dots, sums = channels.gate(upstream, other, None, factor, like=like, total=needed[2])
            if sums is not None:
                db = bias.new_empty(bias.shape)
                channels.add_up(sums, db, like=like, gain=form.shift)
    elif needed[2]:
        db = times(flat.sum(0), form.shift)
    if needed[0]:
        u = flat @ weight
        dx = u if u.dtype == dtype else u.new_empty(u.shape, dtype=dtype)
        rows.unit_rows_backward(u, unit, factor, dots, dx, like=like, form=form, is_unit=True)
    if needed[1]:
        dw = flat.t() @ unit
    return dx, dw, db


class OutputScaled(Function):
    """The function x, W, b → f∘(map + shift·b), or f∘map + shift·b if the constant is 0.

    plain: the same function as a differentiable expression of x, W and b.
    """

    @staticmethod
    def forward(
        ctx: Any,
        linear_map: Rows | Patches,
        plain: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        form: Correction,
    ) -> Tensor:
        """Compute the map, then scale its output in one pass."""
        factor = linear_map.factor(x, form)
        inner = bias if form.constant == 0 else times(bias, form.shift)
        y = linear_map.forward(x, weight, inner if form.constant > 0 else None)
        z = y.new_empty_strided(y.shape, y.stride())
        outer = None if form.constant > 0 or bias is None else bias.contiguous()
        view = linear_map.view(y)
        channels.blend(view, linear_map.view(z), factor, None, outer, gain=form.shift)
        ctx.save_for_backward(x, weight, bias, factor, y)
        ctx.settings = linear_map, plain, form
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of the map at h = f·g, minus the effect of x on f (eqn 33)."""
        x, weight, bias, factor, y = ctx.saved_tensors
        linear_map, plain, form = ctx.settings
        needed = ctx.needs_input_grad[2:5]
        if usable_backward(g):
            with suppress(KernelError):
                other = linear_map.view(y) if needed[0] else None
                upstream = linear_map.view(g)
                # norm-like: the bias is added after the scaling, and its gradient sums g itself
                h, dots, db = scaled_gradient(
                    upstream, factor, other, bias if needed[2] else None, form.shift,
                    form=form, weighted=form.constant > 0,
                )  # fmt: skip
                dx, dw = linear_map.backward(linear_map.restore(h, y), x, weight, needed[:2])
                if dx is not None and dots is not None:
                    c = dots[0] if len(dots) == 1 else dots.sum(0)
                    to = linear_map.view(dx)
                    over = linear_map.spread(c, x)
                    channels.blend(to, to, over, linear_map.view(x), None, gain=-1.0)
                return None, None, dx, dw, db, None
        return None, None, *differentiable(plain, (x, weight, bias), needed, g), None


def output_scaled(
    linear_map: Rows | Patches,
    plain: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Correction,
    dtype: torch.dtype,
) -> Tensor:
    """Apply `OutputScaled` in this dtype."""
    # The map itself adds a bias inside the scaling.
    inner = bias.to(dtype) if bias is not None and form.constant > 0 else bias
    z: Tensor = OutputScaled.apply(linear_map, plain, x.to(dtype), weight.to(dtype), inner, form)
    return z


def input_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: Correction, dtype: torch.dtype
) -> Tensor:
    """Apply `InputScaled` in this dtype and return z."""
    z: Tensor = InputScaled.apply(x, weight.to(dtype), bias, form, dtype)[0]
    return z


def _through_unit(
    u: Tensor | None, gamma: Tensor | None, unit: Tensor, factor: Tensor, form: Correction
) -> Tensor:
    """Return the gradient of x, f(u − (u·x̂ + fγ)x̂/gain²), or fu where eps determines f."""
    u = torch.zeros_like(unit) if u is None else u.to(factor.dtype)
    along = (u * unit).sum(-1, keepdim=True)
    if gamma is not None:
        along = along + factor * gamma
    limit = form.limit(factor.dtype)
    if limit > 0:
        along = along.masked_fill(factor.abs() >= limit, 0.0)
    return factor * (u - along * unit / form.gain**2)
