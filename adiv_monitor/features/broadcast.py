"""Parameters that act entry by entry, broadcast over the rest: gains and offsets.

A parameter's dimensions of size one, and those that it lacks, are shared: every place along them is
a row. Of its own dimensions, the last one is the channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from adiv_monitor.features.features import DenseFeatures, OneHotFeatures
from adiv_monitor.features.rows import Rows, exact_type, to_device
from adiv_monitor.features.uses import FunctionCall, Use, uses
from adiv_monitor.features.whole import Whole

Layout = Callable[[Tensor], Tensor]


def own_dims(parameter: Tensor, shape: Sequence[int]) -> list[int]:
    """The dimensions of the broadcast shape along which the parameter differs."""
    first = len(shape) - parameter.dim()
    return [first + d for d, size in enumerate(parameter.shape) if size > 1]


# --- z = x ⊙ p -----------------------------------------------------------------------------------


@uses("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__")
def product(call: FunctionCall, input: Tensor, other: Tensor) -> Use | None:
    """Z = p⊙x: a gain with x̂ = x (LayerScale, the end of an RMSNorm)."""
    if call.of_model(input) == call.of_model(other):
        return None
    parameter, x = (input, other) if call.of_model(input) else (other, input)
    return gain(call, parameter, x)


@uses("addcmul", "addcmul_")
def added_product(
    call: FunctionCall, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> Use | None:
    """Z = what else + v·p⊙x."""
    if call.of_model(input) or call.of_model(tensor1) == call.of_model(tensor2):
        return None
    parameter, x = (tensor1, tensor2) if call.of_model(tensor1) else (tensor2, tensor1)
    return gain(call, parameter, x if value == 1 else value * x)


@uses("prelu")
def prelu(call: FunctionCall, input: Tensor, weight: Tensor) -> Use | None:
    """Z = max(x, 0) + p⊙min(x, 0)."""
    channels = [1] * (input.dim() - 2) if input.dim() > 1 else []
    of_channels = weight if weight.numel() == 1 else weight.view(-1, *channels)
    found = gain(call, of_channels, input.clamp(max=0))
    return None if found is None else replace(found, weight=weight)


def gain(call: FunctionCall, parameter: Tensor, x: Tensor) -> Use | None:
    """Per entry i of the parameter, φ = x_i."""
    shape = call.result.shape
    own = own_dims(parameter, shape)
    rest = [d for d in range(len(shape)) if d not in own]

    def layout(tensor: Tensor) -> Tensor:
        return tensor[..., None] if not own else tensor.permute(*rest, *own).flatten(len(rest))

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(rows.take(layout(x.expand(shape)))[..., None])

    return Use("gain", parameter, None, features, layout)


# --- z = x + p -----------------------------------------------------------------------------------


@uses("add", "__add__", "__radd__", "add_", "__iadd__")
def total(call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1) -> Use | None:
    """Z = x + p: an offset."""
    if call.of_model(input) == call.of_model(other):
        return None
    if call.of_model(input):
        return offset(input, call.result.shape)
    return offset(other, call.result.shape, sign=alpha)


@uses("sub", "subtract", "__sub__", "sub_", "__isub__")
def difference(call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1) -> Use | None:
    """Z = x − p, or p − x."""
    return total(call, input, other, alpha=-alpha)


@uses("__rsub__", "rsub")
def difference_to(call: FunctionCall, input: Tensor, other: Tensor) -> Use | None:
    """Z = p − x where x.__rsub__(p)."""
    return total(call, other, input, alpha=-1)


@uses("expand", "expand_as", "broadcast_to", "repeat")
def repetition(call: FunctionCall, input: Tensor, *size: object) -> Use | None:
    """Z = p, once for every sample: class tokens, queries that are learned.

    One that is expanded to another parameter's shape is on its way to be part of a weight.
    """
    if size and isinstance(size[0], Tensor) and call.of_model(size[0]):
        return None
    shape = call.result.shape
    first = len(shape) - input.dim()
    whole = all(shape[first + d] == size for d, size in enumerate(input.shape) if size > 1)
    if call.result.numel() == input.numel() or not whole:
        return None
    return offset(input, shape)


@uses("cat", "concat", "concatenate")
def concatenation(call: FunctionCall, tensors: Sequence[Tensor], dim: int = 0) -> list[Use] | None:
    """Z = p in its place among what is data."""
    theirs = [call.of_model(tensor) for tensor in tensors]
    if all(theirs):
        return None
    ends = np.cumsum([tensor.shape[dim] for tensor in tensors])
    found = []
    for tensor, end, is_theirs in zip(tensors, ends, theirs, strict=True):
        if is_theirs and tensor.requires_grad:
            size = tensor.shape[dim]
            place = offset(tensor, tensor.shape)
            layout = _narrowed(dim, int(end) - size, size, place.layout)
            found.append(replace(place, layout=layout))
    return found


def _narrowed(dim: int, start: int, size: int, layout: Layout) -> Layout:
    return lambda tensor: layout(tensor.narrow(dim, start, size))


def offset(parameter: Tensor, shape: Sequence[int], sign: float = 1) -> Use:
    """φ = 1; one-hot(place) where the parameter differs between places, as position tables do."""
    own = own_dims(parameter, shape)
    channel = own[-1] if own else None
    places = own[:-1]
    layout = _last(channel)
    if not places:

        def constant(rows: Rows) -> DenseFeatures:
            count = rows.total if rows.chosen is None else len(rows.chosen)
            ones = torch.full((count, 1), sign, dtype=exact_type(parameter), device=rows.device)
            return DenseFeatures(None, ones)

        return Use("offset", None, parameter, constant, layout)

    sizes = [shape[d] for d in places]

    def one_hot(rows: Rows) -> OneHotFeatures:
        index = np.ravel_multi_index([rows.positions[d] for d in places], sizes)
        token = to_device(index, rows.device)
        trained = torch.ones(len(index), dtype=exact_type(parameter), device=rows.device)
        return OneHotFeatures(token, trained, prod(sizes))

    def whole() -> Whole:
        total = prod(shape) // shape[own[-1]]
        ones = torch.ones(total, dtype=exact_type(parameter), device=parameter.device)
        return Whole(ones, 0.0, ones.new_full((prod(sizes),), total / prod(sizes)))

    def table(tensor: Tensor) -> Tensor:
        return sign * tensor.reshape(prod(sizes), -1)

    return Use("offset", parameter, None, one_hot, layout, whole, table)


def _last(dim: int | None) -> Layout:
    """The layout with this dimension as the channels; None: every entry is a row."""
    return lambda tensor: tensor[..., None] if dim is None else tensor.movedim(dim, -1)
