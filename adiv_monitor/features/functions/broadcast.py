"""Gains and offsets: parameters that act entry by entry and are broadcast over other dimensions.

A parameter is shared along its dimensions of size one and those that it lacks: every position along
them is a row. The last of its other dimensions holds the channels.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures, OneHotFeatures
from adiv_monitor.features.rows import Rows, compute_dtype, to_compute_dtype, to_device
from adiv_monitor.features.uses import Use
from adiv_monitor.features.whole import LateScales, Whole, in_parts


def own_dims(parameter: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the dimensions of the broadcast shape along which the parameter is not broadcast."""
    first = len(shape) - parameter.dim()
    return [first + d for d, size in enumerate(parameter.shape) if size > 1]


def gain(parameter: Tensor, x: Tensor, shape: Sequence[int]) -> Use:
    """Z = p⊙x, of the given shape: per entry i of the parameter, φ = x_i."""
    own = own_dims(parameter, shape)
    rest = [d for d in range(len(shape)) if d not in own]

    def layout(tensor: Tensor) -> Tensor:
        return tensor[..., None] if not own else tensor.permute(*rest, *own).flatten(len(rest))

    def features(rows: Rows) -> DenseFeatures:
        taken = rows.take(layout(x.expand(shape)))  # x may be a boolean mask
        return DenseFeatures(taken.to(torch.promote_types(taken.dtype, parameter.dtype))[..., None])

    def scales(x: Tensor) -> Iterator[Tensor]:
        for part in in_parts(layout(x.expand(shape))):
            yield to_compute_dtype(part).square()

    def late() -> LateScales:
        return LateScales(scales, [x], 0.0)

    return Use("gain", parameter, None, features, layout, late=late)


def offset(
    parameter: Tensor, shape: Sequence[int], factor: float = 1, where: Tensor | None = None
) -> Use | None:
    """Z = factor · p, of the given shape: φ = factor, or ±one-hot(place) if p is a table.

    A table differs in several dimensions; its use is None if the factor is not ±1.

    Args:
        parameter: p.
        shape: shape of z.
        factor: the factor of p.
        where: mask of the rows of z that contain p, broadcast to z; None: all. The other rows have
            zero gradient.
    """
    own = own_dims(parameter, shape)
    channel = own[-1] if own else None
    dtype = compute_dtype(parameter)

    def layout(tensor: Tensor) -> Tensor:
        if where is not None:
            tensor = tensor.masked_fill(~where, 0)
        return tensor[..., None] if channel is None else tensor.movedim(channel, -1)

    def is_there(rows: Rows) -> Tensor:
        if where is None:
            return torch.ones(rows.count, 1, dtype=dtype, device=rows.device)
        there = where.expand(shape)
        there = there[..., None] if channel is None else there.movedim(channel, -1)[..., :1]
        return rows.take(there).to(dtype)

    if len(own) < 2:

        def constant(rows: Rows) -> DenseFeatures:
            return DenseFeatures(None, factor * is_there(rows))

        return Use("offset", None, parameter, constant, layout)

    if abs(factor) != 1:
        return None
    places = own[:-1]
    sizes = [shape[d] for d in places]

    def one_hot(rows: Rows) -> OneHotFeatures:
        index = np.ravel_multi_index([rows.positions[d] for d in places], sizes)
        return OneHotFeatures(to_device(index, rows.device), is_there(rows)[:, 0], prod(sizes))

    def whole() -> Whole:
        ones = torch.ones(prod(shape) // shape[own[-1]], dtype=dtype, device=parameter.device)
        if where is not None:
            return Whole(ones, 0.0, None)
        return Whole(ones, 0.0, ones.new_full((prod(sizes),), len(ones) / prod(sizes)))

    def table(tensor: Tensor) -> Tensor:
        return factor * tensor.reshape(prod(sizes), -1)

    return Use("offset", parameter, None, one_hot, layout, whole, table)
