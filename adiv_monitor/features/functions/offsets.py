"""Sums with a parameter, such as custom biases and position tables."""

from torch import Tensor

from adiv_monitor.features.functions.broadcast import offset
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("add", "__add__", "__radd__", "add_", "__iadd__")
def total(call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1) -> Use | None:
    """Z = x + αp, or p + αx."""
    shape = call.result.shape
    if call.is_weight(input) and call.has_data(other):
        return offset(input, shape)
    if call.is_weight(other) and call.has_data(input):
        return offset(other, shape, alpha)
    return None


@uses("sub", "subtract", "__sub__", "sub_", "subtract_", "__isub__")
def difference(call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1) -> Use | None:
    """Z = x − αp, or p − αx."""
    return total(call, input, other, alpha=-alpha)


@uses("rsub", "__rsub__")
def difference_to(
    call: FunctionCall, input: Tensor, other: Tensor, *, alpha: float = 1
) -> Use | None:
    """Z = p − αx, or x − αp, with the arguments in reverse order."""
    return total(call, other, input, alpha=-alpha)
