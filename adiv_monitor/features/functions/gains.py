"""Elementwise products with a parameter."""

from dataclasses import replace

from torch import Tensor

from adiv_monitor.features.functions.broadcast import gain, offset
from adiv_monitor.features.uses import FunctionCall, Use, uses


@uses("mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__")
def product(call: FunctionCall, input: Tensor, other: Tensor) -> Use | None:
    """Z = p⊙x: a gain with x̂ = x (LayerScale, the end of an RMSNorm)."""
    if call.is_weight(input) and call.has_data(other):
        return gain(input, other, call.result.shape)
    if call.is_weight(other) and call.has_data(input):
        return gain(other, input, call.result.shape)
    return None


@uses("div", "divide", "true_divide", "__div__", "__truediv__")
def quotient(
    call: FunctionCall, input: Tensor, other: Tensor, *, rounding_mode: str | None = None
) -> Use | None:
    """Z = p/x; there is no use in x/p, which is not linear in p."""
    if rounding_mode is None and call.is_weight(input) and call.has_data(other):
        return gain(input, other.reciprocal(), call.result.shape)
    return None


@uses("addcmul", "addcmul_")
def added_product(
    call: FunctionCall, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> list[Use]:
    """Z = x + v·a⊙b, linear in each of x, a and b."""
    if not call.has_data(input, tensor1, tensor2):
        return []
    shape = call.result.shape
    found = _offset(call, input)
    for parameter, x in ((tensor1, tensor2), (tensor2, tensor1)):
        if call.is_weight(parameter):
            found.append(gain(parameter, x if value == 1 else value * x, shape))
    return found


@uses("addcdiv", "addcdiv_")
def added_quotient(
    call: FunctionCall, input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1
) -> list[Use]:
    """Z = x + v·a/b, linear in x and a."""
    if not call.has_data(input, tensor1, tensor2):
        return []
    found = _offset(call, input)
    if call.is_weight(tensor1):
        found.append(gain(tensor1, value / tensor2, call.result.shape))
    return found


@uses("lerp", "lerp_")
def mixture(call: FunctionCall, input: Tensor, end: Tensor, weight: Tensor | float) -> list[Use]:
    """Z = (1 − w)⊙a + w⊙b, linear in each of a, b and w."""
    if not call.has_data(input, end, weight):
        return []
    shape = call.result.shape
    found = []
    for parameter, share in ((input, 1 - weight), (end, weight)):
        if not call.is_weight(parameter):
            continue
        if isinstance(share, Tensor):
            found.append(gain(parameter, share, shape))
        else:
            found += _offset(call, parameter, share)
    if call.is_weight(weight):
        found.append(gain(weight, end - input, shape))
    return found


@uses("prelu")
def prelu(call: FunctionCall, input: Tensor, weight: Tensor) -> Use | None:
    """Z = max(x, 0) + p⊙min(x, 0)."""
    if not call.is_weight(weight) or not call.has_data(input):
        return None
    channels = [1] * (input.dim() - 2)
    of_channels = weight if weight.numel() == 1 else weight.reshape(-1, *channels)
    return replace(gain(of_channels, input.clamp(max=0), input.shape), weight=weight)


def _offset(call: FunctionCall, parameter: Tensor, factor: float = 1) -> list[Use]:
    found = offset(parameter, call.result.shape, factor) if call.is_weight(parameter) else None
    return [] if found is None else [found]
