"""Weights that are computed from parameters, and how they change with these.

A weight that a function gets is often not a parameter: it is a cast, 1 + p, or a mask times p. Such
functions are linear up to a constant, so the weight's change is the same function of the
parameter's change.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.features.rows import compute_dtype

CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MOVES = (*CASTS, "clone", "contiguous", "reshape", "flatten")  # entries stay in their order
_SUMS = ("add", "__add__", "__radd__")
_DIFFERENCES = ("sub", "subtract", "__sub__")
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")
_OPPOSITES = ("neg", "__neg__", "rsub", "__rsub__")


def computed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Tensor,
    source_of: Callable[[Any], Source | None],
) -> Source | None:
    """Return how a function computed its result from a weight; None: it can't be followed.

    Args:
        function: the function.
        args: its arguments, none of them data.
        kwargs: its keyword arguments.
        result: its result.
        source_of: returns the source of a weight; None for a constant.
    """
    name, size, dtype = getattr(function, "__name__", ""), result.shape, compute_dtype(result)
    sources = [*map(source_of, args)]
    found = [source for source in sources if source is not None]
    if name in _MOVES and found and result.device == args[0].device:
        return found[0].then(size, dtype)
    if kwargs or len(found) != 1:
        return None
    is_first = sources[0] is found[0]
    other = next((x for x, source in zip(args, sources, strict=True) if source is None), 1.0)
    if name in _PRODUCTS:
        factor = other
    elif is_first and name in _QUOTIENTS and not isinstance(other, Tensor):
        factor = 1 / other
    elif (is_first and name in _OPPOSITES) or (not is_first and name in _DIFFERENCES):
        factor = -1.0
    elif name in (*_SUMS, *_DIFFERENCES):
        is_view = args[0 if is_first else 1].numel() == size.numel()
        return found[0].then(size, dtype, is_view=is_view)
    else:
        return None
    return found[0].then(factor, size, dtype, is_view=False)
