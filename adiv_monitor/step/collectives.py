"""What all processes have agreed to put together, and have not put together yet.

To put parts together is a collective: a process that doesn't come would keep the others waiting for
ever. So all agree first (`Exchange.agree`), and what fails in one of them after that keeps it from
no collective that was agreed on (`Collectives.settle`).
"""

import math
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.capture.weights.shards import part_of, sharded_as
from adiv_monitor.features.rows import exact, exact_type


class Collectives:
    """The collectives of one step that this process owes the others, in their order."""

    def __init__(self) -> None:
        self._owed: deque[Tensor] = deque()

    def clear(self) -> None:
        """Nothing was agreed on."""
        self._owed.clear()

    def owe(self, alike: Iterable[Tensor], *, next: bool = False) -> None:
        """All processes are to put tensors together that are spread as these are.

        Args:
            alike: tensors of which each process holds a part; the same in all of them.
            next: before all that is owed already.
        """
        if next:
            self._owed.extendleft(reversed(list(alike)))
        else:
            self._owed.extend(alike)

    def whole(self, part: Tensor) -> Tensor:
        """What comes next, put together.

        Args:
            part: what this process has of it.
        """
        sharded = sharded_as(exact(part).contiguous(), self._owed[0])
        self._owed.popleft()  # right before: whatever is still owed was not begun
        whole: Tensor = sharded.full_tensor().detach()
        return whole

    def settle(self) -> None:
        """Come to all that is owed, where something has failed here; with no numbers."""
        while self._owed:
            alike = self._owed.popleft()
            part = part_of(alike)
            nothing = torch.full_like(part, math.nan, dtype=exact_type(part))
            sharded_as(nothing, alike).full_tensor()
