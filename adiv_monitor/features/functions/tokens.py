"""Parameters inserted into data unchanged: class tokens, mask tokens, learned queries."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adiv_monitor.features.functions.broadcast import gain, offset, own_dims
from adiv_monitor.features.rows import behind_view
from adiv_monitor.features.uses import FunctionCall, Use, uses

REPEATING = ("expand", "expand_as", "broadcast_to", "repeat", "tile")


@uses(*REPEATING)
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
def concatenation(call: FunctionCall, tensors: Sequence[Tensor], dim: int = 0) -> list[Use]:
    """Z = p in its part of a concatenation with data."""
    start, found = 0, []
    for tensor in tensors if call.has_data(*tensors) else ():
        size = tensor.shape[dim]
        if call.is_weight(tensor):
            place = partial(torch.narrow, dim=dim, start=start, length=size)
            found += _placed(tensor, tensor.shape, place)
        start += size
    return found


@uses("stack")
def stack(call: FunctionCall, tensors: Sequence[Tensor], dim: int = 0) -> list[Use]:
    """Z = p at its index along a new dimension."""
    found = []
    for i, tensor in enumerate(tensors) if call.has_data(*tensors) else ():
        if call.is_weight(tensor):
            found += _placed(tensor, tensor.shape, partial(torch.select, dim=dim, index=i))
    return found


@uses("where")
def choice(call: FunctionCall, condition: Tensor, input: object, other: object) -> list[Use]:
    """Z = p where a condition holds, or where it does not hold."""
    if not call.has_data(condition, input, other):
        return []
    found = []
    for parameter, mask in ((input, condition), (other, condition.logical_not())):
        if call.is_weight(parameter):
            found += _masked(parameter, mask, call.result.shape)
    return found


@uses("masked_fill", "masked_fill_")
def masked_fill(call: FunctionCall, input: Tensor, mask: Tensor, value: object) -> list[Use]:
    """Z = p where a mask is set."""
    if not call.is_weight(value) or not call.has_data(input, mask):
        return []
    return _masked(value, mask, call.result.shape)


@uses("__setitem__")
def assignment(call: FunctionCall, input: Tensor, index: object, value: object) -> list[Use]:
    """x[index] = p, for an index of slices and numbers, or a mask.

    There is no use if x is a view of a part: it gets no gradient from other reads of its base.
    """
    if input._base is not None and behind_view(input) is input:
        return []
    if call.is_weight(input) and call.has_data(value):
        return _kept(input, index)
    if not call.is_weight(value):
        return []
    if not call.has_data(input) and value.numel() == input[index].numel():  # type: ignore[index]
        return []  # p is written once, as a part of a larger weight
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        rest = input.dim() - index.dim()
        if value.dim() > rest and value.shape[: value.dim() - rest].numel() > 1:
            return []  # p has a different entry for each place
        return _masked(value, index[(..., *(None for _ in range(rest)))], input.shape)
    if _is_plain(index):
        return _placed(value, input[index].shape, lambda tensor: tensor[index])  # type: ignore[index]
    return []


def _kept(parameter: Tensor, index: object) -> list[Use]:
    """Z = p where the assignment did not overwrite it."""
    mask = torch.ones_like(parameter, dtype=torch.bool)
    mask[index] = False  # type: ignore[index]
    return _masked(parameter, mask, parameter.shape)


def _is_plain(index: object) -> bool:
    if isinstance(index, tuple):
        return all(map(_is_plain, index))
    return (
        index is None
        or index is ...
        or (isinstance(index, int | slice) and not isinstance(index, bool))
    )


def _placed(
    parameter: Tensor, shape: Sequence[int], place: Callable[[Tensor], Tensor]
) -> list[Use]:
    """Return the use of a parameter as an offset in a part of the result."""
    found = offset(parameter, shape)
    if found is None:
        return []
    layout = found.layout
    return [replace(found, layout=lambda tensor: layout(place(tensor)))]


def _masked(parameter: Tensor, mask: Tensor, shape: Sequence[int]) -> list[Use]:
    """Return the use of a parameter as an offset where a mask is set; other rows are untrained.

    If the mask differs within rows, it is the use of a gain of zeros and ones.
    """
    own = own_dims(parameter, shape)
    dim = own[-1] - len(shape) if own else 0
    if not own or mask.dim() < -dim or mask.shape[dim] == 1:
        found = offset(parameter, shape, where=mask)
        return [] if found is None else [found]
    entries = gain(parameter, mask, shape)

    def layout(tensor: Tensor) -> Tensor:
        return entries.layout(tensor.masked_fill(~mask, 0))

    return [replace(entries, kind="offset", layout=layout)]
