"""Which rows of a layer are looked at, and how to gather them from a tensor."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from adiv_monitor.measures import row_dots, row_squares

_PERMUTED = 2**17


@dataclass(frozen=True)
class Rows:
    """A choice of rows among the uses of a layer's weights in one call.

    Attributes:
        shape: the output's shape without its channels: (B,) or (B, T) for a linear layer,
            (B, H, W) for a convolution.
        index: sorted positions (rows,) int64 in the flattened `shape`; None: all of them.
    """

    shape: tuple[int, ...]
    index: Tensor | None = None

    @cached_property
    def total(self) -> int:
        """How many rows there are to choose from."""
        return prod(self.shape)

    def take(self, tensor: Tensor) -> Tensor:
        """Gather the rows of a tensor shaped (*shape, channels...) into (rows, channels...).

        Only the chosen rows are read: no copy of the whole tensor, however it is strided.
        The result is float32, or float64 if the tensor is.
        """
        rest = tensor.shape[len(self.shape) :]
        if self.index is None:
            taken = exact(tensor.reshape(self.total, *rest))
            if taken.data_ptr() == tensor.data_ptr():  # a view: training may change it in place
                taken = taken.clone()
        elif tensor.is_contiguous():
            taken = tensor.view(self.total, *rest).index_select(0, self.index)
        else:
            taken = tensor[self.positions(tensor.device)]
        return exact(taken)

    def squares(self, tensor: Tensor) -> Tensor:
        """Squared norms (rows,) of the rows of a tensor shaped (*shape, channels)."""
        if self.index is None:
            tensor = exact(tensor)
            return row_dots(tensor, tensor).reshape(-1)
        return row_squares(self.take(tensor))

    def positions(self, device: torch.device) -> tuple[Tensor, ...]:
        """The index of every row in each dimension of `shape`."""
        if self.index is not None:
            return self._positions
        return self._in_each_dimension(torch.arange(self.total, device=device))

    @cached_property
    def _positions(self) -> tuple[Tensor, ...]:
        assert self.index is not None
        return self._in_each_dimension(self.index)

    def _in_each_dimension(self, rest: Tensor) -> tuple[Tensor, ...]:
        positions = []
        for size in reversed(self.shape[1:]):
            positions.append(rest % size)
            rest = rest // size
        return (rest, *reversed(positions))


def sample(total: int, count: int, generator: torch.Generator) -> Tensor | None:
    """Sorted random choice of `count` among `total` positions, none twice; None: all of them.

    Among very many positions it may be a few less than `count`.
    """
    if count >= total:
        return None
    if total > _PERMUTED:  # a permutation would cost more than a few double draws lose
        drawn: Tensor = torch.unique(
            torch.randint(total, (count,), generator=generator, device="cpu")
        )
        return drawn
    return torch.randperm(total, generator=generator, device="cpu")[:count].sort().values


def exact(tensor: Tensor) -> Tensor:
    """The tensor in the precision of the measures: float32, or float64 if it already is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
