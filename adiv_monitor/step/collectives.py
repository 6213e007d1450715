"""What all ranks have agreed to put together, and have not put together yet.

To put parts together is a collective: a rank that doesn't come would keep the others waiting for
ever. So all agree first (`Exchange.agree`), and what fails in one of them after that keeps it from
no collective that was agreed on (`Collectives.settle`).
"""

import math
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from adiv_monitor.capture.weights.shards import part_of, sharded_as
from adiv_monitor.features.rows import compute_dtype, to_compute_dtype


class Agree(Protocol):
    """Tells whether all ranks come to the same point, of this name."""

    def __call__(self, point: str, *, participates: bool = True) -> bool:
        """Ask; or say, without waiting, that this one does not come."""
        ...


class Collectives:
    """The collectives of one step that this rank owes the others.

    Attributes:
        pending: one tensor per collective, in their order, with the placement of its result. What
            is agreed on must be here at once: a list that was made before, and no call in between.
    """

    def __init__(self) -> None:
        self.pending: deque[Tensor] = deque()

    def whole(self, part: Tensor) -> Tensor:
        """What comes next, put together.

        Args:
            part: what this rank has of it.
        """
        sharded = sharded_as(to_compute_dtype(part).contiguous(), self.pending[0])
        self.pending.popleft()  # right before: whatever is still pending was not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def settle(self) -> None:
        """Come to all that is pending, where something has failed here; with no numbers."""
        while self.pending:
            alike = self.pending.popleft()
            part = part_of(alike)
            nothing = torch.full_like(part, math.nan, dtype=compute_dtype(part))
            sharded_as(nothing, alike).full_tensor()
