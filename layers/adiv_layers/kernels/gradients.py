"""Gradients of scaled outputs, and gradient-only corrections, by kernels."""

from typing import Any

import torch
from torch import Tensor

from adiv_layers.forms import accumulation_dtype, least_square
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
    dots, sums = channels.gate(g, factor, other, scaled=h, total=bias is not None, **settings)
    db = None if sums is None or bias is None else channels.add_up(sums, bias, gain)
    return h, dots, db


def row_gradients(
    x: Tensor, g: Tensor, bias: bool, proportional: bool, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return gradient-only corrections (eqns 20, 21) of W and b, from rows x and gradients g."""
    weighted = proportional and bias
    gain, constant = _share(bias, proportional)
    # Scale the narrower tensor; but near x = 0 only x/‖x‖² is certain to be finite.
    if x.shape[1] <= g.shape[1] or not weighted:
        unit, factor = torch.empty_like(x), x.new_empty(len(x), dtype=accumulation_dtype(x.dtype))
        floor = least_square(eps, factor)
        rows.unit_rows(x, factor, unit, gain=gain, constant=constant, floor=floor, squared=True)
        if not bias:
            return g.t() @ unit, None
        if not weighted:
            return g.t() @ unit, g.sum(0).mul_(gain)
        _, sums = channels.gate(columns(g), factor.view(1, 1, -1), total=True)
        assert sums is not None
        return g.t() @ unit, channels.add_up(sums, g[0])
    factor = Rows().factor(x, gain, constant, eps, squared=True)
    h, _, db = scaled_gradient(columns(g), factor, None, g[0], 1.0)
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
    gain, constant = _share(bias, proportional)
    factor = patches.factor(x, gain, constant, eps, squared=True)
    like = g.new_empty(g.shape[1]) if bias else None
    h, _, db = scaled_gradient(
        patches.view(g), factor, None, like, 1.0 if weighted else gain, weighted=weighted
    )
    _, dw = patches.backward(patches.restore(h, g), x, weight, (False, True))
    return dw, db


def _share(bias: bool, proportional: bool) -> tuple[float, float]:
    """Return gain and constant of a row's factor: 1/(‖x‖² + 1), 1/(2‖x‖²); 1/‖x‖² without bias."""
    if proportional and bias:
        return 1.0, 1.0
    return (0.5 if bias else 1.0), 0.0
