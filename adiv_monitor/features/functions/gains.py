"""Gains and offsets: parameters that act entry by entry and are broadcast over other dimensions.

Per entry i of a gain φ = x_i; of a normaliser's γ⊙x̂ + δ, φ = [x̂_i, 1], scale x̂_i² + 1.

A parameter is shared along its dimensions of size one and those that it lacks: every position along
them is a row. The last of its other dimensions holds the channels. An offset may fill a part of the
result only, as class tokens, mask tokens and learned queries do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.features import DenseFeatures, OneHotFeatures
from adiv_monitor.features.rows import (
    Rows,
    Whole,
    behind_view,
    compute_dtype,
    to_compute_dtype,
    to_device,
)
from adiv_monitor.features.uses import Found, FunctionCall, Use, channels_second, uses


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

    return Use("gain", parameter, None, features, layout)


def offset(parameter: Tensor, shape: Sequence[int]) -> Use:
    """Z = p, of the given shape: φ = 1, or one-hot(place) if p is a table.

    A table differs in several dimensions.

    Args:
        parameter: p.
        shape: shape of z.
    """
    own = own_dims(parameter, shape)
    channel = own[-1] if own else None
    dtype = compute_dtype(parameter)

    def layout(tensor: Tensor) -> Tensor:
        return tensor[..., None] if channel is None else tensor.movedim(channel, -1)

    def ones(count: int) -> Tensor:
        return torch.ones(count, dtype=dtype, device=parameter.device)

    if len(own) < 2:

        def constant(rows: Rows) -> DenseFeatures:
            return DenseFeatures(None, ones(rows.count)[:, None])

        return Use("offset", None, parameter, constant, layout)

    places = own[:-1]
    sizes = [shape[d] for d in places]

    def one_hot(rows: Rows) -> OneHotFeatures:
        index = np.ravel_multi_index([rows.positions[d] for d in places], sizes)
        return OneHotFeatures(to_device(index, rows.device), ones(rows.count), prod(sizes))

    def whole(rows: Rows) -> Whole:
        return Whole(ones(prod(shape) // shape[own[-1]]))

    def table(tensor: Tensor) -> Tensor:
        return tensor.reshape(prod(sizes), -1)

    return Use("offset", parameter, None, one_hot, layout, whole, table)


# --- sums of products ----------------------------------------------------------------------------


def terms(call: FunctionCall, *products: tuple[object, Any]) -> Found:
    """Return the uses in z = Σ p⊙factor, of those p that are parameters.

    Args:
        call: the call.
        products: every p with its factor: a tensor, or the number 1. There is no use if all of
            them are of the model.
    """
    if not call.has_data(*chain(*products)):
        return []
    shape = call.result.shape
    return [
        gain(p, factor, shape) if isinstance(factor, Tensor) else offset(p, shape)
        for p, factor in products
        if call.is_weight(p)
    ]


@uses("mul", "multiply", "__mul__", "__rmul__")
def product(call: FunctionCall, input: Tensor, other: Tensor) -> Found:
    """Z = p⊙x: a gain with x̂ = x (LayerScale, the end of an RMSNorm)."""
    return terms(call, (input, other), (other, input))


@uses("add", "__add__", "__radd__", "add_", "__iadd__")
def total(call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1) -> Found:
    """Z = x + p."""
    return terms(call, (input, 1), (other, 1)) if alpha == 1 else []


@uses("addcmul", "addcmul_")
def added_product(
    call: FunctionCall, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> Found:
    """Z = x + a⊙b, linear in each of x, a and b."""
    products = (input, 1), (tensor1, tensor2), (tensor2, tensor1)
    return terms(call, *products) if value == 1 else []


@uses("prelu")
def prelu(call: FunctionCall, input: Tensor, weight: Tensor) -> Use | None:
    """Z = max(x, 0) + p⊙min(x, 0)."""
    if not call.is_weight(weight) or not call.has_data(input):
        return None
    channels = [1] * (input.dim() - 2)
    of_channels = weight if weight.numel() == 1 else weight.reshape(-1, *channels)
    return replace(gain(of_channels, input.clamp(max=0), input.shape), weight=weight)


# --- offsets in a part of the result -------------------------------------------------------------


@uses("expand", "expand_as", "broadcast_to", "repeat", "tile")
def repetition(call: FunctionCall, input: Tensor, *size: object, **_: object) -> Use | None:
    """Z = p, repeated for every sample.

    There is no use if it is repeated to another parameter's shape, or for an empty batch.
    """
    if size and isinstance(size[0], Tensor) and call.of_model(size[0]):
        return None
    shape = call.result.shape
    first = len(shape) - input.dim()
    whole = all(shape[first + d] == size for d, size in enumerate(input.shape) if size > 1)
    if not call.is_weight(input) or call.result.numel() in (0, input.numel()) or not whole:
        return None
    return offset(input, shape)


@uses("cat", "concat", "concatenate")
def concatenation(call: FunctionCall, tensors: Sequence[Tensor], dim: int = 0) -> Found:
    """Z = p in its part of a concatenation with data."""
    start, found = 0, list[Use | None]()
    for tensor in tensors if call.has_data(*tensors) else ():
        size = tensor.shape[dim]
        if call.is_weight(tensor):
            place = partial(torch.narrow, dim=dim, start=start, length=size)
            found.append(_placed(tensor, tensor.shape, place))
        start += size
    return found


@uses("__setitem__")
def assignment(call: FunctionCall, input: Tensor, index: Any, value: object) -> Use | None:
    """x[mask] = p.

    There is no use if x is a view of a part: it gets no gradient from other reads of its base.
    """
    if input._base is not None and behind_view(input) is input:
        return None
    if getattr(index, "dtype", None) != torch.bool or not call.is_weight(value):
        return None
    rest = input.dim() - index.dim()
    if value.dim() > rest and value.shape[: value.dim() - rest].numel() > 1:
        return None  # p has a different entry for each place
    others = ~index[(..., *(None for _ in range(rest)))]  # rows without a gradient
    return _placed(value, input.shape, lambda tensor: tensor.masked_fill(others, 0))


def _placed(parameter: Tensor, shape: Sequence[int], place: Callable[[Tensor], Tensor]) -> Use:
    """Return the use of a parameter as an offset in a part of the result."""
    found = offset(parameter, shape)
    layout = found.layout
    return replace(found, layout=lambda tensor: layout(place(tensor)))


# --- normalisers --------------------------------------------------------------------------------


def normaliser(
    call: FunctionCall,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalised: Callable[[Rows], Tensor],
    *,
    dims: int = 0,
) -> Use | None:
    """Return the use of γ and δ in γ⊙x̂ + δ, φ = [x̂_i, 1]; None if x is a standardised weight.

    x̂ is what torch's own function computes without γ and δ: of the chosen rows alone, or of all
    where it takes statistics over rows.

    Args:
        call: the call.
        input: x.
        weight: γ.
        bias: δ.
        normalised: returns x̂ of the chosen rows.
        dims: the number of dimensions, the last ones, that are normalised together; 0: channels are
            in the second dimension.
    """
    if call.of_model(input):
        return None

    def layout(tensor: Tensor) -> Tensor:
        return tensor.flatten(-dims) if dims else channels_second(tensor)

    def features(rows: Rows) -> DenseFeatures:
        return DenseFeatures(normalised(rows).flatten(1)[..., None], None if bias is None else 1.0)

    return Use("gain", weight, bias, features, layout=layout)


@uses("layer_norm")
def layer_norm(
    call: FunctionCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) over the normalised dimensions."""

    def normalised(rows: Rows) -> Tensor:
        return functional.layer_norm(rows.take(input), normalized_shape, eps=eps)

    return normaliser(call, input, weight, bias, normalised, dims=len(normalized_shape))


@uses("rms_norm")
def rms_norm(
    call: FunctionCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Use | None:
    """x̂ = x / √(mean x² + ε) over the normalised dimensions."""
    # With eps=None torch takes the smallest number of the dtype it computes in: the input's.
    constant = torch.finfo(input.dtype).eps if eps is None else eps

    def normalised(rows: Rows) -> Tensor:
        return functional.rms_norm(rows.take(input), normalized_shape, eps=constant)

    return normaliser(call, input, weight, None, normalised, dims=len(normalized_shape))


@uses("group_norm")
def group_norm(
    call: FunctionCall,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) over each sample's groups of channels."""

    def normalised(rows: Rows) -> Tensor:
        made = functional.group_norm(to_compute_dtype(input), num_groups, eps=eps)
        return rows.take(channels_second(made))

    return normaliser(call, input, weight, bias, normalised)


@uses("instance_norm")
def instance_norm(
    call: FunctionCall,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) per sample and channel, or with the running statistics."""
    if use_input_stats:
        return group_norm(call, input, input.shape[1], weight, bias, eps)
    return batch_norm(call, input, running_mean, running_var, weight, bias, False, 0.0, eps)


@uses("batch_norm")
def batch_norm(
    call: FunctionCall,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Use | None:
    """x̂ = (x − mean) / √(var + ε) per channel, of the batch; running ones in evaluation."""

    def normalised(rows: Rows) -> Tensor:
        own = None if training else running_mean, None if training else running_var
        mean, var = (x if x is None else to_compute_dtype(x) for x in own)
        is_own = mean is None or var is None
        made = functional.batch_norm(to_compute_dtype(input), mean, var, training=is_own, eps=eps)
        return rows.take(channels_second(made))

    return normaliser(call, input, weight, bias, normalised)
