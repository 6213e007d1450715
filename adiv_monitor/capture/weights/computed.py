"""Weights that are computed from parameters, and how they change with these.

A weight that a function gets is often not a parameter: it is a cast, 1 + p, a mask times p, or
several parameters side by side. Such functions are linear up to a constant, so the weight's change
is the same function of the parameters' changes. A parametrization of torch is any function, of
which the derivative is taken by running it again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.pieces import Piece, Source, Strides, constant, overlap, view_of
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import pattern, tolerance
from adiv_monitor.rerun.twin import Twin

Moved = Callable[[Sequence[Tensor]], Tensor]  # (changes of the sources) → change of the tensor

CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MOVES = (*CASTS, "clone", "contiguous", "reshape", "flatten")  # entries stay in their order
_SUMS = ("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "rsub", "__rsub__")
# Which arguments are weights where the sum has the gradient of the one weight in it.
_KEPT: dict[str, Sequence[list[bool]]] = {
    **dict.fromkeys(_SUMS[:3], ([True, False], [False, True])),
    **dict.fromkeys(_SUMS[3:6], ([True, False],)),
}
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__", "neg", "__neg__", *_QUOTIENTS)
_JOINS = ("cat", "concat", "concatenate", "stack")


class NotFollowed(Refused):
    """A weight is computed from parameters in a way that can't be followed."""


def _from(
    sources: Sequence[Source],
    form: object,
    moved: Moved,
    *,
    is_view: bool,
    constants: Sequence[object] = (),
) -> Source:
    """Return the source of a tensor that is computed from other weights.

    Args:
        sources: of these weights.
        form: equal for tensors that are computed alike.
        moved: returns its change.
        is_view: see `Source`.
        constants: the values on which the change depends.
    """
    return Source(
        tuple(dict.fromkeys(piece for source in sources for piece in source.pieces)),
        (form, *(source.identity for source in sources)),
        lambda parts: moved([source.of(parts) for source in sources]),
        is_view,
        [*map(constant, constants), *(x for source in sources for x in source.constants)],
    )


def computed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Tensor,
    source_of: Callable[[Any], Source | None],
) -> Source | None:
    """Return how a function computed its result from weights; None: it can't be followed.

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
        return _from(
            [only],
            (name, shape),
            lambda changes: changes[0].reshape(shape).to(device, dtype),
            is_view=only.is_view,
        )
    joins = name in _JOINS and bool(args) and "out" not in kwargs
    if not joins and (kwargs or name not in (*_SUMS, *_PRODUCTS)):
        return None
    given, more = (args[0], args[1:]) if joins else (args, ())
    every = [source_of(value) for value in given]
    sources = [source for source in every if source is not None]
    if name in _PRODUCTS:
        if len(sources) != 1 or (name in _QUOTIENTS and every[0] is None):
            return None
        rest = [x.detach() if isinstance(x, Tensor) else x for x in given]
        is_view = False
    else:  # constants do not change
        rest = [torch.zeros_like(x) if isinstance(x, Tensor) else 0 for x in given]
        is_view = _is_apart(sources) if joins else [*map(bool, every)] in _KEPT.get(name, ())
        size = sum(x.numel() for x, source in zip(given, every, strict=True) if source)
        is_view &= size == result.numel() and all(source.is_view for source in sources)
    places = [*map(bool, every)]
    constants = [x for x, moves in zip(rest, places, strict=True) if not moves]

    def moved(changes: Sequence[Tensor]) -> Tensor:
        following, fixed = iter(changes), iter(constants)
        values = [next(following if moves else fixed) for moves in places]
        found: Tensor = function(values, *more, **kwargs) if joins else function(*values)
        return found.to(dtype)

    form = name, shape, *places
    tells = [x if name in _PRODUCTS else getattr(x, "shape", ()) for x in constants]
    tells += [*more, *kwargs.items()]
    return _from(sources, form, moved, is_view=is_view, constants=tells)


def part_of(source: Source, view: Tensor, whole: Tensor) -> Source:
    """Return the source of a view of a tensor whose source is known."""
    strides = Strides.between(view, whole)
    stride = whole.stride()

    def viewed(changes: Sequence[Tensor]) -> Tensor:
        return strides.of(changes[0], stride)

    is_view = source.is_view and not strides.repeats
    return _from([source], strides, viewed, is_view=is_view)


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

    constants = [object()] if draws else []
    return _from([*map(view_of, pieces)], maker, moved, is_view=False, constants=constants)


def _summary(made: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number that tells one weight from another, and a bound of its size."""
    whole = to_compute_dtype(made.detach())
    numbers = pattern(whole)
    return (whole * numbers).sum(), torch.linalg.vector_norm(whole) * whole.numel() ** 0.5


def _is_apart(sources: Sequence[Source]) -> bool:
    """Return whether no entry of a parameter is in the sources twice."""
    pieces = [piece for source in sources for piece in source.pieces]
    parameters = dict.fromkeys(piece.parameter for piece in pieces)
    return not any(overlap(p, [x for x in pieces if x.parameter is p]) for p in parameters)
