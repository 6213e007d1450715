"""Collectives that all ranks have agreed on and have not performed yet.

A rank that does not participate in an all-gather would keep the others waiting forever. So all
ranks agree first (`Exchange.agree`), and a rank that fails after that still participates in every
collective that was agreed on (`Collectives.settle`).
"""

import math
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from adiv_monitor.capture.weights.shards import part_of, sharded_as
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype


class Agree(Protocol):
    """Function that returns whether all ranks participate in the point of this name."""

    def __call__(self, point: str, *, participates: bool = True) -> bool:
        """Wait for the other ranks; or decline, without waiting, if `participates` is False."""
        ...


class Collectives:
    """The pending collectives of one step.

    Attributes:
        pending: one tensor per collective, in order, with the placement of the parts. Append a list
            made beforehand right after the agreement, with no call in between that may fail.
    """

    def __init__(self) -> None:
        self.pending: deque[Tensor] = deque()

    def whole(self, part: Tensor) -> Tensor:
        """Perform the next pending collective, and return the unsharded tensor.

        Args:
            part: this rank's part of it.
        """
        sharded = sharded_as(to_compute_dtype(part).contiguous(), self.pending[0])
        self.pending.popleft()  # right before the collective: all that is pending has not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def settle(self) -> None:
        """Participate in all pending collectives with NaN, after a failure in this rank."""
        while self.pending:
            alike = self.pending.popleft()
            part = part_of(alike)
            nothing = torch.full_like(part, math.nan, dtype=compute_dtype(part))
            sharded_as(nothing, alike).full_tensor()
