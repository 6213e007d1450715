"""The pieces of parameters that a layer trains, and how its weight is computed from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.shards import (
    gradient_part,
    is_shard,
    part_of,
    range_of_part,
)

Parts = Mapping[int, Tensor]  # by a piece's key, a tensor of its shape: a change, a gradient


@dataclass(frozen=True)
class Strides:
    """The position of a view in its parameter's memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def between(cls, view: Tensor, whole: Tensor) -> "Strides":
        """Return the position of a view in the memory of the tensor that it views."""
        offset = int(view.storage_offset()) - int(whole.storage_offset())
        return cls(tuple(view.shape), view.stride(), offset)

    @property
    def repeats(self) -> bool:
        """Whether the view contains an entry several times."""
        return any(s == 0 and n > 1 for n, s in zip(self.size, self.stride, strict=True))

    @property
    def contiguous_range(self) -> tuple[int, int] | None:
        """The start and end of the view in memory if it has no gaps, else None."""
        expected = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=itemgetter(1)):
            if size > 1 and stride != expected:
                return None
            expected *= size
        return self.offset, self.offset + prod(self.size)

    def of(self, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        """Return the same view of another tensor, laid out with these strides as the viewed one."""
        if tensor.stride() != stride:
            like = torch.empty_strided(
                tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = like.copy_(tensor)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or a view of a part of it, as one layer uses it.

    Attributes:
        parameter: the parameter.
        key: identifies the piece.
        view: the part of the parameter; None: all of it.
    """

    parameter: nn.Parameter
    key: int
    view: Strides | None = None

    @property
    def name(self) -> str:
        """The parameter's rows in the piece, in Python's notation; "" if it has all rows."""
        if self.view is None:
            return ""
        row = self.parameter.stride(0)
        within = self.view.contiguous_range
        if within is None or not row or any(place % row for place in within):
            return f"[{self.view.offset}+]"
        return f"[{within[0] // row}:{within[1] // row}]"

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece of a tensor that is shaped like the parameter."""
        return tensor if self.view is None else self.view.of(tensor, self.parameter.stride())

    @property
    def contiguous_range(self) -> tuple[int, int] | None:
        """The start and end of the piece in this rank's part; None if it is not contiguous."""
        assert self.view is not None
        within, part = self.view.contiguous_range, range_of_part(self.parameter)
        if within is None or part is None:
            return None
        first, last = (min(max(place, part[0]), part[1]) - part[0] for place in within)
        return first, last

    def own(self, part: Tensor) -> Tensor:
        """Return the piece of this rank's part of such a tensor."""
        if self.view is None:
            return part
        if not is_shard(self.parameter):
            return self.of(part)
        assert self.contiguous_range is not None
        first, last = self.contiguous_range
        return part.reshape(-1)[first:last]

    def value(self) -> Tensor:
        """Return the current value of the piece, as far as this rank holds it."""
        part = part_of(self.parameter)
        return part if self.view is None else self.own(part)

    def gradient(self) -> Tensor:
        """Return ∂L/∂θ of the piece from `.grad`, or zeros if there is none. See `value`."""
        return self.own(gradient(self.parameter))


@dataclass(frozen=True, eq=False)
class Source:
    """How a function's argument is computed from pieces of parameters.

    Attributes:
        pieces: the pieces.
        identity: equal for tensors that are computed alike from the same pieces.
        of: returns its first-order change for changes of the pieces.
        is_view: whether each entry is one of a piece, plus a constant, so that it has its gradient.
        constants: the values on which the change depends.
        through: the module through which the pieces are measured; None: functions use them.
    """

    pieces: Sequence[Piece]
    identity: object
    of: Callable[[Parts], Tensor]
    is_view: bool = True
    constants: Sequence[object] = ()
    through: nn.Module | None = None

    def is_as(self, other: "Source | None") -> bool:
        """Return whether it changes like another source of the same identity."""
        if other is None or len(other.constants) != len(self.constants):
            return False
        return all(map(_same, self.constants, other.constants))

    def then(
        self,
        form: object,
        moved: Callable[[Tensor], Tensor],
        *,
        is_view: bool = True,
        constants: Sequence[object] = (),
    ) -> "Source":
        """Return the source of a tensor that is computed from this one.

        Args:
            form: equal for tensors that are computed alike.
            moved: returns its change for the change of this one.
            is_view: whether each entry is one of this tensor, plus a constant.
            constants: the values on which the change depends.
        """
        of, identity = self.of, (form, self.identity)
        constants = [*constants, *self.constants]
        is_view &= self.is_view
        return Source(self.pieces, identity, lambda parts: moved(of(parts)), is_view, constants)


def _same(one: object, other: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and one == other)
    return one is other or (one.device == other.device and torch.equal(one, other))


def view_of(piece: Piece, strides: Strides | None = None) -> Source:
    """Return the source of a piece, or of all of it in another shape.

    Args:
        piece: the piece.
        strides: the position in the piece's memory; None: as the piece itself.
    """
    return Source((piece,), (piece.key, strides), partial(_viewed, piece, strides))


def _viewed(piece: Piece, strides: Strides | None, parts: Parts) -> Tensor:
    part = parts[piece.key]
    return part if strides is None else strides.of(part, piece.parameter.stride())


def together(pieces: Sequence[Piece], module: nn.Module) -> Source:
    """Return the source of a vector (P,) of several pieces that are measured through a module."""
    change = partial(_concatenated, [piece.key for piece in pieces])
    return Source(pieces, (module, *(piece.key for piece in pieces)), change, through=module)


def _concatenated(keys: Sequence[int], parts: Parts) -> Tensor:
    return torch.cat([parts[key].reshape(-1) for key in keys])


class Pieces:
    """All pieces of a step, with one object for each part of a parameter."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, Strides | None], Piece] = {}
        self._whole: dict[int, Source] = {}

    def of(self, parameter: nn.Parameter, view: Strides | None = None) -> Piece:
        """Return the piece for a parameter or a part of it."""
        key = id(parameter), view
        if key not in self._pieces:
            self._pieces[key] = Piece(parameter, len(self._pieces), view)
        return self._pieces[key]

    def source(self, tensor: Tensor, parameter: nn.Parameter, whole: Tensor) -> Source | None:
        """Return the source of a parameter or of a view of it; None for views that repeat entries.

        Args:
            tensor: the parameter or the view.
            parameter: the parameter.
            whole: the parameter, or the unsharded one in its place while its module runs.
        """
        if tensor is whole:
            return self.whole(parameter)
        strides = Strides.between(tensor, whole)
        return None if strides.repeats else self.view(parameter, strides)

    def whole(self, parameter: nn.Parameter) -> Source:
        """Return a parameter as a source without changes."""
        if id(parameter) not in self._whole:
            self._whole[id(parameter)] = view_of(self.of(parameter))
        return self._whole[id(parameter)]

    def view(self, parameter: nn.Parameter, strides: Strides) -> Source:
        """Return a view of a parameter; if it shows only a part, that part is the piece."""
        if prod(strides.size) == parameter.numel():
            return view_of(self.of(parameter), strides)
        return view_of(self.of(parameter, strides))


def whole_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return ∂L/∂θ from `.grad`, or this rank's part; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros_like(part_of(parameter))
    return gradient_part(parameter.grad, parameter)


def covered(parameter: Tensor, pieces: Sequence[Piece]) -> int:
    """Return how many entries of the parameter lie in at least one of the pieces."""
    views = {piece.view for piece in pieces}
    if None in views:
        return parameter.numel()
    return _covered(parameter, [view for view in views if view is not None])


def overlap(parameter: nn.Parameter, pieces: Sequence[Piece]) -> bool:
    """Return whether several layers use the same entries, given one piece for each use."""
    if len(pieces) < 2:
        return False
    views = [piece.view for piece in pieces if piece.view is not None]
    if len(set(views)) < len(pieces):
        return True
    return _covered(parameter, views) < sum(prod(view.size) for view in views)


def _covered(parameter: Tensor, views: Sequence[Strides]) -> int:
    ranges = [view.contiguous_range for view in views]
    if None not in ranges:
        end = count = 0
        for first, last in sorted(s for s in ranges if s is not None):
            count += max(last - max(first, end), 0)
            end = max(end, last)
        return count
    marked = torch.empty_strided(parameter.size(), parameter.stride(), dtype=torch.bool).zero_()
    for view in views:
        marked.as_strided(view.size, view.stride, view.offset).fill_(True)
    return int(marked.count_nonzero())
