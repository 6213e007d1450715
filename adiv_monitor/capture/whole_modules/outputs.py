"""Which tensors of what a module's forward gives are its z, and which entries of them are a row."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.whole_modules.graph import nodes_above
from adiv_monitor.features.rows import shares_memory
from adiv_monitor.rerun.nested import tensors_in


class Outputs:
    """The z of a module that is measured as a whole.

    z are the tensors of the output that gradients come through: not those that others of them are
    made of, nor their views, whose gradient they get too; scalars only if there is nothing else.

    Rows of one tensor (batch, …, channels) are all positions, with the channels in the last
    dimension; of images and volumes, four and five dimensions, in the second one. Several tensors
    that are alike but for their channels are put side by side; those that share no more than
    the batch are one row for each of its elements; others are one row, all of them together.

    Args:
        output: what the forward gave.
        inputs: tensors that it got, which are no output of it.

    Attributes:
        like: shape, dtype and device of those tensors.
    """

    def __init__(self, output: Any, inputs: Iterable[Tensor]) -> None:
        given = {id(tensor) for tensor in inputs}
        every = list(tensors_in(output))
        trained = {
            id(tensor): tensor
            for tensor in every
            if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in given
        }
        tensors = _without_makers(_without_scalars(list(trained.values())))
        ids = [id(tensor) for tensor in every]
        self._places = [ids.index(id(tensor)) for tensor in tensors]
        self._count = len(every)
        self.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._kept = _alike([tensor.shape for tensor in tensors])

    @property
    def precision(self) -> float:
        """Rounding of the coarsest of those tensors."""
        return max(torch.finfo(dtype).eps for _, dtype, _ in self.like)

    def of(self, output: Any) -> list[Tensor]:
        """The same tensors of what another call gave."""
        every = list(tensors_in(output))
        if len(every) != self._count:
            raise ValueError(f"its forward gave {self._count} tensors, then {len(every)}")
        return [every[place] for place in self._places]

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """z, with all dimensions but the last one for the rows."""
        if len(tensors) == 1:
            return _channels_last(tensors[0])
        kept = self._kept
        flat = [x.reshape(*x.shape[:kept], -1) if kept else x.reshape(1, -1) for x in tensors]
        return torch.cat(flat, -1)

    def hook(
        self, tensors: Sequence[Tensor], arrive: Callable[[Tensor], None], guard: Guard
    ) -> None:
        """Call it with ∂L/∂z, laid out as z, whenever that is known."""

        def arrives(gradients: Sequence[Tensor | None]) -> None:
            arrive(self._gradient(gradients))

        if len(tensors) == 1:
            one = partial(guard, lambda gradient: arrives([gradient]))
            tensors[0].register_hook(one)  # type: ignore[no-untyped-call]
        else:
            register_multi_grad_hook(tensors, partial(guard, arrives))

    def _gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """∂L/∂z from that of each tensor; None: zero."""
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self.like, strict=True)
        ]
        return self.rows(found)


def _alike(shapes: Sequence[Sequence[int]]) -> int:
    """How many leading dimensions of several tensors are those of rows: all but one, one, none."""
    if not shapes:
        return 0
    first = shapes[0]
    choices = (kept for kept in (len(first) - 1, 1) if kept > 0)
    return next((k for k in choices if all(shape[:k] == first[:k] for shape in shapes)), 0)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor.reshape(1, 1)
    if tensor.dim() == 1:
        return tensor[:, None]
    return tensor.movedim(1, -1) if tensor.dim() in (4, 5) else tensor


def _without_scalars(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.dim()] or tensors


def _without_makers(tensors: list[Tensor]) -> list[Tensor]:
    """Without those that others are made of; of a view and what it views, without the view."""
    if len(tensors) < 2:
        return tensors
    dropped = set()
    for tensor in tensors:
        above = set(nodes_above([tensor]))
        for maker in tensors:
            if maker.grad_fn in above:
                dropped.add(id(tensor if shares_memory(maker, tensor) else maker))
    return [tensor for tensor in tensors if id(tensor) not in dropped]
