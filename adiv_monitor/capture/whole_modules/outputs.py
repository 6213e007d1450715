"""Determines which output tensors of a module are its z, and which entries form a row."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.hook import on_gradient
from adiv_monitor.capture.whole_modules.graph import nodes_above
from adiv_monitor.features.rows import shares_memory
from adiv_monitor.rerun.nested import tensors_in


class Outputs:
    """The z of a module that is measured as a whole.

    z are the output tensors that gradients pass through. Tensors that others of them are computed
    from are left out, and so are views of others, whose gradient arrives at the viewed tensor.
    Scalars count only if there is nothing else.

    The rows of one tensor (batch, …, channels) are all positions, with the channels in the last
    dimension; in images and volumes, with four and five dimensions, they are in the second one.
    Several tensors of the same shape except for the channels are concatenated. Those that share
    only the batch form one row per batch element; all others form a single row together.

    Args:
        output: the output of the forward.
        inputs: its input tensors, which do not count as outputs.

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
        """The machine epsilon of the coarsest tensor of z."""
        return max(torch.finfo(dtype).eps for _, dtype, _ in self.like)

    def of(self, output: Any) -> list[Tensor]:
        """Return the same tensors of another call's output."""
        every = list(tensors_in(output))
        if len(every) != self._count:
            raise ValueError(f"its forward returned {self._count} tensors, then {len(every)}")
        return [every[place] for place in self._places]

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return z, with all dimensions but the last one indexing rows."""
        if len(tensors) == 1:
            return _channels_last(tensors[0])
        kept = self._kept
        flat = [x.reshape(*x.shape[:kept], -1) if kept else x.reshape(1, -1) for x in tensors]
        return torch.cat(flat, -1)

    def hook(
        self, tensors: Sequence[Tensor], arrive: Callable[[Tensor], None], guard: Guard
    ) -> None:
        """Call `arrive` with ∂L/∂z in the layout of z whenever a backward pass computes it."""

        def arrives(gradients: Sequence[Tensor | None]) -> None:
            arrive(self.gradient(gradients))

        if len(tensors) == 1:
            on_gradient(tensors[0], partial(guard, lambda gradient: arrives([gradient])))
        else:
            register_multi_grad_hook(tensors, partial(guard, arrives))

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return ∂L/∂z from the gradients of the tensors, where None means zero."""
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self.like, strict=True)
        ]
        return self.rows(found)


def _alike(shapes: Sequence[Sequence[int]]) -> int:
    """Return how many leading dimensions of all tensors index rows: all but one, one, or none."""
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
    """Return the tensors that no other is computed from; a viewed tensor replaces its view."""
    if len(tensors) < 2:
        return tensors
    dropped = set()
    for tensor in tensors:
        above = set(nodes_above([tensor]))
        for maker in tensors:
            if maker.grad_fn in above:
                dropped.add(id(tensor if shares_memory(maker, tensor) else maker))
    return [tensor for tensor in tensors if id(tensor) not in dropped]
