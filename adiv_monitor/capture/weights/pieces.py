"""The pieces of parameters that a layer trains, and how its weight is computed from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import itemgetter

import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.shards import gradient_part, is_shard, part_of, range_of_part


@dataclass(frozen=True)
class Strides:
    """The position of a view in the memory of another tensor.

    Attributes:
        size: the size of the view.
        stride: its strides.
        offset: where it begins.
        within: the strides of the other tensor.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    within: tuple[int, ...]

    @classmethod
    def between(cls, view: Tensor, whole: Tensor) -> "Strides":
        """Return the position of a view in the memory of the tensor that it views."""
        offset = int(view.storage_offset()) - int(whole.storage_offset())
        return cls(tuple(view.shape), view.stride(), offset, whole.stride())

    @property
    def contiguous_range(self) -> tuple[int, int] | None:
        """The start and end of the view in memory if it has no gaps, else None."""
        expected = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=itemgetter(1)):
            if size > 1 and stride != expected:
                return None
            expected *= size
        return self.offset, self.offset + prod(self.size)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the same view of a tensor that is shaped like the viewed one."""
        if tensor.stride() != self.within:
            like = torch.empty_strided(
                tensor.shape, self.within, dtype=tensor.dtype, device=tensor.device
            )
            tensor = like.copy_(tensor)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


Key = tuple[int, Strides | None]  # of a piece
Parts = Mapping[Key, Tensor]  # a tensor of each piece's shape: a change, a gradient


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or a view of a part of it, as one layer uses it.

    Attributes:
        parameter: the parameter.
        view: the part of the parameter; None: all of it.
    """

    parameter: nn.Parameter
    view: Strides | None = None

    @cached_property
    def key(self) -> Key:
        """Equal for the same part of the same parameter."""
        return id(self.parameter), self.view

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
        return tensor if self.view is None else self.view.of(tensor)

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
            return self.view.of(part)
        assert self.contiguous_range is not None
        first, last = self.contiguous_range
        return part.reshape(-1)[first:last]

    def value(self) -> Tensor:
        """Return the current value of the piece, as far as this rank holds it."""
        if self.view is None and type(self.parameter) is nn.Parameter:  # nearly always
            return self.parameter.detach()
        return self.own(part_of(self.parameter))


Step = Strides | torch.Size | torch.dtype  # done to a tensor: a view, another shape or dtype


def _stepped(tensor: Tensor, step: Step) -> Tensor:
    if isinstance(step, Strides):
        return step.of(tensor)
    return tensor.reshape(step) if isinstance(step, torch.Size) else tensor.to(step)


@dataclass(frozen=True, eq=False)
class Source:
    """The pieces of parameters whose entries, plus constants, are those of a function's argument.

    Attributes:
        pieces: the pieces; several where `steps` are not known, or of a module as a whole.
        steps: what is done to the piece; None: not known.
        through: the module through which the pieces are measured; None: functions use them.
    """

    pieces: Sequence[Piece]
    steps: tuple[Step, ...] | None = ()
    through: nn.Module | None = None

    def of(self, parts: Parts) -> Tensor:
        """Return its first-order change for changes of the pieces; as a vector for a module."""
        if self.through is not None:
            return torch.cat([parts[piece.key].reshape(-1) for piece in self.pieces])
        change = parts[self.pieces[0].key]
        for step in self.steps or ():
            change = _stepped(change, step)
        return change

    def then(self, *steps: Step) -> "Source":
        """Return the source of a tensor that is computed from this one by steps."""
        return self if self.steps is None else replace(self, steps=(*self.steps, *steps))

    @cached_property
    def identity(self) -> object:
        """Equal for tensors that are computed alike."""
        return self.through, *(piece.key for piece in self.pieces), self.steps


def whole_of(tensor: Tensor) -> Tensor:
    """Return the tensor that this one is a view of, or itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return ∂L/∂θ from `.grad`, or this rank's part; zeros if there is none."""
    found = parameter.grad
    if found is None:
        return torch.zeros_like(part_of(parameter))
    return found.detach() if type(found) is Tensor else gradient_part(found, parameter)


def overlap(pieces: Sequence[Piece]) -> bool:
    """Return whether several layers use the same piece, or all of it, given one for each use.

    Of pieces that overlap in part, the check of the gradient tells.
    """
    views = {piece.view for piece in pieces}
    return len(views) < len(pieces) or (None in views and len(pieces) > 1)
