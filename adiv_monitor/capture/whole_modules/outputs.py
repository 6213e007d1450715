"""Determines which output tensor of a module is its z, and which entries form a row."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.hook import on_gradient
from adiv_monitor.rerun.nested import tensors_in


class Outputs:
    """The z of a module that is measured as a whole: its one output tensor with a gradient.

    Scalars count only if there is nothing else. With several such tensors there is no z.

    The rows of z (batch, …, channels) are all positions, with the channels in the last dimension;
    in images and volumes, with four and five dimensions, they are in the second one.

    Args:
        output: the output of the forward.
        inputs: its input tensors, which do not count as outputs.

    Attributes:
        precision: the machine epsilon of z.
    """

    def __init__(self, output: Any, inputs: Iterable[Tensor]) -> None:
        given, every = set(map(id, inputs)), tensors_in(output)
        trained = {
            id(x): place
            for place, x in enumerate(every)
            if x.requires_grad and x.is_floating_point() and id(x) not in given
        }
        places = [*trained.values()]
        places = [place for place in places if every[place].dim()] or places
        self._places = places if len(places) == 1 else []
        self._count = len(every)
        self.precision = max((torch.finfo(every[at].dtype).eps for at in self._places), default=0.0)

    def of(self, output: Any) -> list[Tensor]:
        """Return z alone of this or another call's output; nothing if there is no z."""
        every = tensors_in(output)
        if len(every) != self._count:
            raise ValueError(f"its forward returned {self._count} tensors, then {len(every)}")
        return [every[place] for place in self._places]

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return z, with all dimensions but the last one indexing rows."""
        (z,) = tensors
        if z.dim() < 2:
            return z.reshape(-1, 1)
        return z.movedim(1, -1) if z.dim() in (4, 5) else z

    def hook(
        self, tensors: Sequence[Tensor], arrive: Callable[[Tensor], None], guard: Guard
    ) -> None:
        """Call `arrive` with ∂L/∂z in the layout of z whenever a backward pass computes it."""
        on_gradient(tensors[0], partial(guard, lambda gradient: arrive(self.rows([gradient]))))

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return ∂L/∂z in the layout of z; None: it is zero."""
        return None if gradients[0] is None else self.rows([gradients[0]])
