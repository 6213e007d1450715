"""What all processes have agreed to put together, and have not put together yet.

To put parts together is a collective: a process that doesn't come would keep the others waiting for
ever. So all agree first (`Exchange.agree`), and what fails in one of them after that keeps it from
no collective that was agreed on (`Collectives.settle`).
"""

import math
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from adiv_monitor.capture.weights.shards import part_of, sharded_as
from adiv_monitor.features.rows import exact, exact_type


class Agree(Protocol):
    """Tells whether all processes come to the same point, of this name."""

    def __call__(self, point: str, *, comes: bool = True) -> bool:
        """Ask; or say, without waiting, that this one does not come."""
        ...


class Collectives:
    """The collectives of one step that this process owes the others.

    Attributes:
        owed: for each, in their order, a tensor that is spread as that is which comes then. What is
            agreed on must be here at once: a list that was made before, and no call in between.
    """

    def __init__(self) -> None:
        self.owed: deque[Tensor] = deque()

    def whole(self, part: Tensor) -> Tensor:
        """What comes next, put together.

        Args:
            part: what this process has of it.
        """
        sharded = sharded_as(exact(part).contiguous(), self.owed[0])
        self.owed.popleft()  # right before: whatever is still owed was not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def settle(self) -> None:
        """Come to all that is owed, where something has failed here; with no numbers."""
        while self.owed:
            alike = self.owed.popleft()
            part = part_of(alike)
            nothing = torch.full_like(part, math.nan, dtype=exact_type(part))
            sharded_as(nothing, alike).full_tensor()
