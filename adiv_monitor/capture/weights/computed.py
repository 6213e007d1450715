"""Weights that are computed from parameters, and how they change with these.

A weight that a function gets is often not a parameter: it is a cast, 1 + p, a mask times p, or
several parameters side by side. Such functions are linear up to a constant, so the weight's change
is the same function of the parameters' changes. A parametrization of torch is any function, of
which the derivative is taken by running it again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.pieces import (
    Parts,
    Piece,
    Source,
    Strides,
    View,
    memory_of,
    overlap,
)
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import pattern, tolerance
from adiv_monitor.rerun.twin import Twin

Function = Callable[..., Any]
Moved = Callable[[Sequence[Tensor]], Tensor]  # (changes of the sources) → change of the tensor

CASTS = ("to", "float", "double", "half", "bfloat16", "type", "type_as")
_MOVES = (*CASTS, "clone", "contiguous", "reshape", "flatten")  # entries stay in their order
_SUMS = ("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "rsub", "__rsub__")
_NEGATED = {"sub": 1, "subtract": 1, "__sub__": 1, "rsub": 0, "__rsub__": 0}  # which argument
_PRODUCTS = ("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = ("div", "divide", "true_divide", "__truediv__")
_JOINS = ("cat", "concat", "concatenate", "stack")


class NotFollowed(Refused):
    """A weight is computed from parameters in a way that can't be followed."""


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that is computed from other weights. See `Source`.

    Attributes:
        sources: of these weights.
        moved: returns its change.
        form: equal for tensors that are computed alike.
        is_view: whether each entry is an entry of a parameter, plus a constant.
        constants: the factors on which the change depends, as they were.
        versions: the versions of their memory.
    """

    sources: Sequence[Source]
    moved: Moved
    form: object
    is_view: bool
    constants: Sequence[object] = ()
    versions: Sequence[int] = ()

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of parameters that it depends on."""
        return tuple(dict.fromkeys(piece for source in self.sources for piece in source.pieces))

    @property
    def identity(self) -> object:
        """A value equal for tensors that are computed alike from the same pieces."""
        return self.form, tuple(source.identity for source in self.sources)

    def is_as(self, other: Source | None) -> bool:
        """Return whether the constants are the same, too."""
        if not isinstance(other, Computed) or other.form != self.form:
            return False
        pairs = zip(self.constants, other.constants, strict=True)
        sources = zip(self.sources, other.sources, strict=True)
        return all(_same(a, b) for a, b in pairs) and all(a.is_as(b) for a, b in sources)

    def of(self, parts: Parts) -> Tensor:
        """Return its change for a change of the pieces.

        Raises:
            Refused: a constant was changed in place since, or a parametrization can't be run again.
        """
        if [*self.versions] != _versions(self.constants):
            raise Refused("a constant from which its weight is computed was changed in place since")
        return self.moved([source.of(parts) for source in self.sources])


def computed(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Tensor,
    source_of: Callable[[Any], Source | None],
) -> Computed | None:
    """Return how a function computed its result from weights; None: it can't be followed.

    Args:
        name: name of the function.
        args: its arguments, none of them data.
        kwargs: its keyword arguments.
        result: its result.
        source_of: returns the source of a weight; None for a constant.
    """
    shape, dtype, device = result.shape, compute_dtype(result), result.device
    form = name, shape
    if name in _MOVES:
        (source,) = _sources(args[:1], source_of)

        def as_it_was(changes: Sequence[Tensor]) -> Tensor:
            return changes[0].reshape(shape).to(device, dtype)

        return Computed([source], as_it_was, form, source.is_view)
    if name in _JOINS and args and not kwargs.get("out"):
        every = [source_of(tensor) for tensor in args[0]]
        sources = [source for source in every if source is not None]
        rest = [None if s else torch.zeros_like(x) for s, x in zip(every, args[0], strict=True)]
        join, more = getattr(torch, name), args[1:]

        def joined(changes: Sequence[Tensor]) -> Tensor:
            given = iter(changes)
            return join([next(given) if x is None else x for x in rest], *more, **kwargs)

        pieces = [piece for source in sources for piece in source.pieces]
        is_view = len(sources) == len(every) and not _overlap(pieces)
        form = (*form, *more, *kwargs.items(), *map(bool, sources))
        return Computed(sources, joined, form, is_view and all(s.is_view for s in sources))
    if kwargs or name not in (*_SUMS, *_PRODUCTS, *_QUOTIENTS, "neg", "__neg__"):
        return None
    every = [source_of(value) for value in args[:2]]
    sources = [source for source in every if source is not None]
    if name in _SUMS:
        signs = [-1 if _NEGATED.get(name) == i else 1 for i, s in enumerate(every) if s is not None]

        def added(changes: Sequence[Tensor]) -> Tensor:
            terms = [x if s > 0 else -x for x, s in zip(changes, signs, strict=True)]
            return reduce(torch.add, terms).expand(shape).to(dtype)

        moves = signs == [1] and sources[0].is_view and result.numel() == _size(args, every)
        return Computed(sources, added, (*form, *signs), moves)
    if len(sources) != 1 or (name in _QUOTIENTS and every[0] is None):
        return None
    factor = -1 if len(args) == 1 else args[0 if every[0] is None else 1]
    factor = factor.detach() if isinstance(factor, Tensor) else factor

    def scaled(changes: Sequence[Tensor]) -> Tensor:
        found = changes[0] / factor if name in _QUOTIENTS else changes[0] * factor
        return found.to(dtype)

    return Computed(sources, scaled, form, False, [factor], _versions([factor]))


def part_of(source: Source, view: Tensor, whole: Tensor) -> Computed:
    """Return the source of a view of a tensor whose source is known."""
    strides = Strides.between(view, whole)
    stride = whole.stride()

    def viewed(changes: Sequence[Tensor]) -> Tensor:
        return strides.of(changes[0], stride)

    return Computed([source], viewed, strides, source.is_view and not strides.repeats)


def parametrized(
    maker: nn.Module, pieces: Sequence[Piece], made: Tensor, twin: Twin, *, draws: bool
) -> Computed:
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
        values = {name: twin.parameters[name] for name in moving}
        try:
            again, found = twin.jvp(values, tangents, _call)
        except Exception as error:
            raise Refused(f"its parametrization can't be run again: {error}") from error
        off = float((_summary(again)[0] - expected).abs())
        if not off <= tolerance(twin.precision) * float(length):
            raise Refused("its parametrization returned another weight when it was run again")
        return to_compute_dtype(found) * unit

    constants = [object()] if draws else []
    views = [View(piece) for piece in pieces]
    return Computed(views, moved, maker, False, constants, _versions(constants))


def _call(module: nn.Module, forward: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunction():
        return forward()


def _summary(made: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number that tells one weight from another, and a bound of its size."""
    whole = to_compute_dtype(made.detach())
    numbers = pattern(whole)
    return (whole * numbers).sum(), torch.linalg.vector_norm(whole) * whole.numel() ** 0.5


def _sources(values: Sequence[Any], source_of: Callable[[Any], Source | None]) -> Sequence[Source]:
    return [source for value in values if (source := source_of(value)) is not None]


def _size(args: Sequence[Any], sources: Sequence[Source | None]) -> int:
    """Return the number of entries of the weights among the arguments."""
    return sum(x.numel() for x, s in zip(args, sources, strict=False) if s is not None)


def _overlap(pieces: Sequence[Piece]) -> bool:
    parameters = dict.fromkeys(piece.parameter for piece in pieces)
    return any(overlap(p, [x for x in pieces if x.parameter is p]) for p in parameters)


def _same(one: object, other: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and one == other)
    if (memory_of(one), one._version) == (memory_of(other), other._version):
        return one.shape == other.shape and one.storage_offset() == other.storage_offset()
    return one.device == other.device and torch.equal(one, other)


def _versions(constants: Sequence[object]) -> list[int]:
    return [x._version for x in constants if isinstance(x, Tensor)]
