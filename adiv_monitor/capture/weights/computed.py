"""Weights that are computed from parameters, and how they change with these.

A weight that a function gets is often not a parameter: it is a cast, 1 + p, or a mask times p. Such
functions are linear up to a constant, so the weight's change is the same function of the
parameter's change. A parametrization of torch is any function, of which the derivative is taken by
running it again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.pieces import Piece, Source, Strides
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import pattern, tolerance
from adiv_monitor.rerun.twin import Twin

CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MOVES = (*CASTS, "clone", "contiguous", "reshape", "flatten")  # entries stay in their order
# The arguments in which a sum has the gradient of the weight.
_KEPT = {
    **dict.fromkeys(("add", "__add__", "__radd__"), (0, 1)),
    **dict.fromkeys(("sub", "subtract", "__sub__"), (0,)),
    **dict.fromkeys(("rsub", "__rsub__"), ()),
}
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__", "neg", "__neg__")
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")


class NotFollowed(Refused):
    """A weight is computed from parameters in a way that can't be followed."""


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
    shape, dtype, device = result.shape, compute_dtype(result), result.device
    name = getattr(function, "__name__", "")
    if name in _MOVES and (only := source_of(args[0])) is not None:
        return only.then((name, shape), lambda x: x.reshape(shape).to(device, dtype))
    if kwargs or name not in (*_KEPT, *_PRODUCTS, *_QUOTIENTS):
        return None
    found = {place: source for place, x in enumerate(args) if (source := source_of(x)) is not None}
    if len(found) != 1 or (name in _QUOTIENTS and 0 not in found):
        return None
    ((place, only),) = found.items()
    rest = [x.detach() if isinstance(x, Tensor) else x for x in args]
    is_same = place in _KEPT.get(name, ()) and args[place].numel() == result.numel()
    if name in _KEPT:  # constants do not change
        rest = [torch.zeros_like(x) if isinstance(x, Tensor) else 0 for x in rest]

    def moved(change: Tensor) -> Tensor:
        values: Tensor = function(*rest[:place], change, *rest[place + 1 :])
        return values.to(dtype)

    constants = [] if name in _KEPT else [*rest[:place], *rest[place + 1 :]]
    return only.then((name, shape, place), moved, is_view=is_same, constants=constants)


def part_of(source: Source, view: Tensor, whole: Tensor) -> Source:
    """Return the source of a view of a tensor whose source is known."""
    strides, stride = Strides.between(view, whole), whole.stride()
    return source.then(strides, lambda x: strides.of(x, stride), is_view=not strides.repeats)


def parametrized(
    maker: nn.Module, pieces: Sequence[Piece], made: Tensor, twin: Twin, *, draws: bool
) -> Source:
    """Return the source of a weight that a parametrization made.

    Args:
        maker: the parametrization.
        pieces: the parameters of it that are measured.
        made: the weight.
        twin: runs it again.
        draws: whether it drew random numbers, so that its calls differ.
    """
    with torch.no_grad():
        expected, length = _summary(made)
    names = {id(p): name for name, p in maker.named_parameters()}
    moving = [names[id(piece.parameter)] for piece in pieces]

    def moved(changes: Sequence[Tensor]) -> Tensor:
        unit = torch.stack([x.abs().amax() for x in changes]).amax()  # as half precision needs it
        unit = torch.where(unit == 0, 1, unit)
        tangents = {name: x / unit for name, x in zip(moving, changes, strict=True)}
        try:
            again, found = twin.jvp(tangents, lambda weight: weight)
        except Exception as error:
            raise Refused(f"its parametrization can't be run again: {error}") from error
        off = float((_summary(again)[0] - expected).abs())
        if not off <= tolerance(twin.precision) * float(length):
            raise Refused("its parametrization returned another weight when it was run again")
        return to_compute_dtype(found) * unit

    keys, constants = [piece.key for piece in pieces], [object()] if draws else []
    return Source(
        pieces,
        (maker, *keys),
        lambda parts: moved([parts[key] for key in keys]),
        is_view=False,
        constants=constants,
    )


def _summary(made: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number that tells one weight from another, and a bound of its size."""
    whole = to_compute_dtype(made.detach())
    numbers = pattern(whole)
    return (whole * numbers).sum(), torch.linalg.vector_norm(whole) * whole.numel() ** 0.5
