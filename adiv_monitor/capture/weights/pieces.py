"""What a layer trains: parameters, or pieces of them, and how its weight is made of those."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.shards import (
    gradient_part,
    is_shard,
    part_of,
    range_of_part,
)

Parts = Mapping[int, Tensor]  # by a piece's key, a tensor of its shape: a change, a gradient
NOTHING: Parts = {}


@dataclass(frozen=True)
class Strides:
    """How a view lies in its parameter's memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def between(cls, view: Tensor, whole: Tensor) -> "Strides":
        """How a view lies in the memory of the tensor that it is a view of."""
        offset = int(view.storage_offset()) - int(whole.storage_offset())
        return cls(tuple(view.shape), view.stride(), offset)

    @property
    def repeats(self) -> bool:
        """Whether it shows an entry several times."""
        return any(s == 0 and n > 1 for n, s in zip(self.size, self.stride, strict=True))

    @property
    def contiguous_range(self) -> tuple[int, int] | None:
        """From where to where it lies in memory, if without a gap."""
        expected = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=itemgetter(1)):
            if size > 1 and stride != expected:
                return None
            expected *= size
        return self.offset, self.offset + prod(self.size)

    def of(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """The view of a tensor that is shaped like the parameter."""
        if tensor.stride() != parameter.stride():
            like = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=tensor.dtype, device=tensor.device
            )
            tensor = like.copy_(tensor)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or a view of a part of it, as one layer uses it.

    Attributes:
        parameter: the parameter.
        key: tells pieces apart.
        view: which part; None: all of it.
    """

    parameter: nn.Parameter
    key: int
    view: Strides | None = None

    @property
    def name(self) -> str:
        """Which rows of the parameter it is, as in Python; "" if all."""
        if self.view is None:
            return ""
        row = self.parameter.stride(0)
        within = self.view.contiguous_range
        if within is None or not row or any(place % row for place in within):
            return f"[{self.view.offset}+]"
        return f"[{within[0] // row}:{within[1] // row}]"

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that is shaped like the parameter."""
        return tensor if self.view is None else self.view.of(tensor, self.parameter)

    @property
    def contiguous_range(self) -> tuple[int, int] | None:
        """From where to where it lies in this rank's part; None if not in one contiguous range."""
        assert self.view is not None
        within, part = self.view.contiguous_range, range_of_part(self.parameter)
        if within is None or part is None:
            return None
        first, last = (min(max(place, part[0]), part[1]) - part[0] for place in within)
        return first, last

    def own(self, part: Tensor) -> Tensor:
        """The piece of what this rank holds of such a tensor: all, or its part."""
        if self.view is None:
            return part
        if not is_shard(self.parameter):
            return self.of(part)
        assert self.contiguous_range is not None
        first, last = self.contiguous_range
        return part.reshape(-1)[first:last]

    def value(self) -> Tensor:
        """The piece as it is now, as far as this rank holds it."""
        part = part_of(self.parameter)
        return part if self.view is None else self.own(part)

    def gradient(self) -> Tensor:
        """∂L/∂θ of the piece as it stands in `.grad`; zeros where there is none. See `value`."""
        return self.own(gradient(self.parameter))


class Source(Protocol):
    """What a tensor that a function got is made of."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of parameters that it depends on."""
        ...

    @property
    def identity(self) -> object:
        """Equal for tensors that are made alike of the same pieces."""
        ...

    @property
    def is_view(self) -> bool:
        """Whether its entries are entries of a piece, so that its gradient is theirs."""
        ...

    def is_as(self, other: "Source | None") -> bool:
        """Whether it changes as another one of the same identity does."""
        ...

    def of(self, parts: Parts, taken: Parts = NOTHING) -> Tensor:
        """How the tensor changes, to first order, when the pieces change by `parts`.

        Args:
            parts: a change of the pieces.
            taken: what a step took away from the pieces since the tensor was made: the change is
                to start from where they were.
        """
        ...


@dataclass(frozen=True, eq=False)
class View:
    """A piece as it is, or all of it in another shape.

    Attributes:
        piece: the piece.
        strides: how it lies in the piece's memory; None: as the piece itself.
    """

    piece: Piece
    strides: Strides | None = None

    @property
    def pieces(self) -> Sequence[Piece]:
        """The one."""
        return (self.piece,)

    @property
    def identity(self) -> object:
        """The same view of the same piece."""
        return self.piece.key, self.strides

    @property
    def is_view(self) -> bool:
        """Always."""
        return True

    def is_as(self, other: Source | None) -> bool:
        """Always."""
        return True

    def of(self, parts: Parts, taken: Parts = NOTHING) -> Tensor:
        """The same view of the piece's change, wherever that starts."""
        part = parts[self.piece.key]
        return part if self.strides is None else self.strides.of(part, self.piece.parameter)


@dataclass(frozen=True, eq=False)
class ConcatenatedParameters:
    """Several pieces, one after the other in one vector.

    Attributes:
        pieces: the pieces.
        through: the module that they are measured through.
    """

    pieces: Sequence[Piece]
    through: nn.Module

    @property
    def identity(self) -> object:
        """The same pieces through the same."""
        return self.through, tuple(piece.key for piece in self.pieces)

    @property
    def is_view(self) -> bool:
        """The gradient of the vector is that of the pieces."""
        return True

    def is_as(self, other: Source | None) -> bool:
        """It is made of nothing else."""
        return True

    def of(self, parts: Parts, taken: Parts = NOTHING) -> Tensor:
        """All their changes in a vector (P,)."""
        return torch.cat([parts[piece.key].reshape(-1) for piece in self.pieces])


class Pieces:
    """All pieces of a step: the same one for the same part of a parameter."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, Strides | None], Piece] = {}
        self._whole: dict[int, View] = {}

    def of(self, parameter: nn.Parameter, view: Strides | None = None) -> Piece:
        """The piece."""
        key = id(parameter), view
        if key not in self._pieces:
            self._pieces[key] = Piece(parameter, len(self._pieces), view)
        return self._pieces[key]

    def source(self, tensor: Tensor, parameter: nn.Parameter, whole: Tensor) -> View | None:
        """What a parameter, or a view of it, is; None for views that repeat entries.

        Args:
            tensor: the one or the other.
            parameter: the parameter.
            whole: it, or what stands in for it while its module runs.
        """
        if tensor is whole:
            return self.whole(parameter)
        strides = Strides.between(tensor, whole)
        return None if strides.repeats else self.view(parameter, strides)

    def whole(self, parameter: nn.Parameter) -> View:
        """A parameter as it is."""
        if id(parameter) not in self._whole:
            self._whole[id(parameter)] = View(self.of(parameter))
        return self._whole[id(parameter)]

    def view(self, parameter: nn.Parameter, strides: Strides) -> View:
        """A view of a parameter; of a part of it, that part is the piece."""
        if prod(strides.size) == parameter.numel():
            return View(self.of(parameter), strides)
        return View(self.of(parameter, strides))


def gradient(parameter: nn.Parameter) -> Tensor:
    """∂L/∂θ as it stands in `.grad`, or this rank's part; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(part_of(parameter))
    return gradient_part(parameter.grad, parameter)


def covered(parameter: Tensor, pieces: Sequence[Piece]) -> int:
    """How many entries of the parameter lie in one of the pieces at least."""
    views = {piece.view for piece in pieces}
    if None in views:
        return parameter.numel()
    return _covered(parameter, [view for view in views if view is not None])


def overlap(parameter: nn.Parameter, pieces: Sequence[Piece]) -> bool:
    """Whether several layers use the same entries: one piece for each use."""
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
