"""Gradients of scaled outputs, and gradient-only corrections, by kernels."""

from typing import Any

from torch import Tensor

from adiv_layers.forms import Correction, accumulation_dtype
from adiv_layers.kernels import channels, rows
from adiv_layers.kernels.maps import Patches, Rows, columns


def scaled_gradient(
    g: Tensor,
    factor: Tensor,
    other: Tensor | None,
    bias: Tensor | None,
    gain: float,
    **settings: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h = f·g laid out like `other` or g, dots as in `channels.gate`, and b's gradient."""
    like = g if other is None else other
    images, count, positions = g.shape
    if like.stride(1) < like.stride(2):
        h = g.new_empty(images, positions, count).transpose(1, 2)
    else:
        h = g.new_empty(images, count, positions)
    dots, sums = channels.gate(g, other, h, factor, total=bias is not None, **settings)
    return h, dots, None if bias is None else _added_up(sums, bias, gain)


def _added_up(sums: Tensor, like: Tensor, gain: float) -> Tensor:
    """Return gain·Σ over the rows of partial sums, in the dtype of `like`."""
    total = like.new_empty(sums.shape[1])
    channels.add_up(sums, total, gain=gain)
    return total


def row_gradients(
    x: Tensor, g: Tensor, bias: bool, proportional: bool, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return gradient-only corrections (eqns 20, 21) of W and b, from rows x and gradients g."""
    weighted = proportional and bias
    form = _share(bias, proportional, eps)
    # Scale the narrower tensor; but near x = 0 only x/‖x‖² is certain to be finite.
    if x.shape[1] <= g.shape[1] or not weighted:
        x = rows.rows_of(x)
        unit = x.new_empty(x.shape)
        factor = x.new_empty((1, 1, x.shape[0]), dtype=accumulation_dtype(x.dtype))
        rows.unit_rows(x, factor, unit, form=form, squared=True)
        if not bias:
            return g.t() @ unit, None
        if not weighted:
            return g.t() @ unit, g.sum(0).mul_(form.gain)
        _, sums = channels.gate(columns(g), None, None, factor, total=True)
        return g.t() @ unit, _added_up(sums, g, 1.0)
    factor = Rows().factor(x, form, squared=True)
    h, _, db = scaled_gradient(columns(g), factor, None, g, 1.0)
    return h.squeeze(0) @ x, db


def patch_gradients(
    patches: Patches,
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    bias: bool,
    proportional: bool,
    eps: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Return gradient-only corrections of W and b of a convolution, from input and gradients g."""
    weighted = proportional and bias
    form = _share(bias, proportional, eps)
    factor = patches.factor(x, form, squared=True)
    gain = 1.0 if weighted else form.gain
    given = patches.view(g), factor, None, g if bias else None, gain
    h, _, db = scaled_gradient(*given, weighted=weighted)
    _, dw = patches.backward(patches.restore(h, g), x, weight, (False, True))
    return dw, db


def _share(bias: bool, proportional: bool, eps: float) -> Correction:
    """Return the form of a row's factor: 1/(‖x‖² + 1), 1/(2‖x‖²); 1/‖x‖² without bias."""
    gain = 0.5 if bias and not proportional else 1.0
    return Correction(gain, 1.0, 1.0 if proportional and bias else 0.0, eps)
