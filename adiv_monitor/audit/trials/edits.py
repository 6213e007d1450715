"""Edits of single calls: what a line may have meant to compute.

An edit replaces the result of one call. Rearrangements take axes, operands or ends the other
way; what is left out returns its input.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, given

_SCALE = ("mul", "multiply", "__mul__", "__rmul__", "div", "__truediv__")
_ORDERED = ("sub", "__sub__", "__rsub__", "rsub", "div", "__truediv__", "kl_div")
_VIEWS = ("view", "reshape", "flatten")
_ALONG = (  # with the axis as second argument
    *("softmax", "log_softmax", "logsumexp", "sum", "mean", "std", "var", "amax", "amin", "max"),
    *("min", "argmax", "argmin", "gather", "index_select", "cumsum", "cumprod", "flip", "cat"),
)
# What trains as well without these functions may train faster. Dropout has findings of its own.
_KEPT = (
    *("__get__", "__set__", "to", "float", "contiguous", "clone", "type", "linear", "embedding"),
    *("masked_fill", "tril", "triu"),
    *("relu", "gelu", "silu", "elu", "selu", "leaky_relu", "mish", "softplus", "dropout"),
)


class Edit(NamedTuple):
    """A change of a call.

    Attributes:
        words: The change, behind the name of the function.
        result: The new result, from the call.
        leaves_out: Whether the function is left out.
    """

    words: str
    result: Callable[[Call], Any]
    leaves_out: bool = False


def edits_of(call: Call) -> Iterator[Edit]:
    """Yield the edits of a call that has returned a tensor; some may not run."""
    if tensors := given(call):
        yield from _of_axes(call, tensors[0])
        if call.name == "__getitem__" and _other_end(call.args[1]) is not None:
            yield Edit("at the other end", lambda call: call.args[0][_other_end(call.args[1])])
        if call.path is not None:  # another sign or weight makes another loss
            yield from _of_operands(call, tensors)


def _of_axes(call: Call, x: Tensor) -> Iterator[Edit]:
    second = call.args[1] if call.args[1:] and call.name in _ALONG else None
    axis = call.kwargs.get("dim", second)
    if type(axis) is int and x.ndim:
        for other in {*range(x.ndim)} - {axis % x.ndim}:
            yield Edit(f"with dim={other}", partial(_along, axis=other))
    if call.name in _VIEWS:
        for pair in combinations(range(min(x.ndim, 3)), 2):
            words = "after a transpose of axes {} and {}".format(*pair)
            yield Edit(words, partial(_transposed, pair=pair))


def _along(call: Call, axis: int) -> Any:
    if "dim" in call.kwargs:
        return call.function(*call.args, **{**call.kwargs, "dim": axis})
    return call.function(call.args[0], axis, *call.args[2:], **call.kwargs)


def _transposed(call: Call, pair: tuple[int, int]) -> Any:
    x = call.args[0].transpose(*pair).contiguous()
    return call.function(x, *call.args[1:], **call.kwargs)


def _of_operands(call: Call, tensors: list[Tensor]) -> Iterator[Edit]:
    x, made = tensors[0], call.result
    second = call.args[1] if call.args[1:] else None
    if call.name in _ORDERED and isinstance(second, Tensor) and second.shape == x.shape:
        yield Edit("with its operands exchanged", _exchanged)
    if call.name in _SCALE and type(second) in (int, float) and second not in (-1, 0, 1):
        yield Edit("by the inverse number", lambda c: c.function(c.args[0], 1 / c.args[1]))
    is_alike = x.is_floating_point() and (x.shape, x.dtype) == (made.shape, made.dtype)
    # A mask, or another constant, may keep the answer from the model.
    hides = any(not y.requires_grad for y in tensors[1:])
    is_kept = call.name in _KEPT or "rand" in call.name
    if is_alike and x is not made and not hides and not is_kept:
        yield Edit("left out", lambda call: given(call)[0], leaves_out=True)


def _exchanged(call: Call) -> Any:
    x, y, *others = call.args
    return call.function(y, x, *others, **call.kwargs)


def _other_end(index: Any) -> Any:
    """Return the index with 0 and -1 exchanged; None: it has neither."""
    every = index if isinstance(index, tuple) else (index,)
    ends = {0: -1, -1: 0}
    if not any(type(i) is int and i in ends for i in every):
        return None
    other = tuple(ends.get(i, i) if type(i) is int else i for i in every)
    return other if isinstance(index, tuple) else other[0]
