"""Schedules of measured steps: at a fixed interval, or by a bound on their cost."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low

from torch import Tensor

from adiv_monitor.step.ranks import Ranks
from adiv_monitor.step.times import step_times

# Numbers of steps from the start of a measured one until its cost is read, since a device may lag
# behind, and until all ranks know the interval that the first rank has set.
_READ, _SHORTEST = 8, 16


class Schedule:
    """Schedule that measures steps at an interval, or as often as a bound on its cost allows.

    The cost is determined from two measured steps, the second after the least interval, since the
    first includes everything that is slow in a new run. A longer interval afterwards compensates
    for the cost of both.

    Args:
        every_n_steps: the interval; with a bound the least one.
        max_overhead: the bound on the share, above 0 and below 1; None: no bound.

    Attributes:
        interval: present number of steps from one measured step to the next.
    """

    def __init__(self, every_n_steps: int, max_overhead: float | None) -> None:
        bounded = max_overhead is not None
        self.interval = self._least = max(every_n_steps, _SHORTEST) if bounded else every_n_steps
        self._bound = max_overhead
        self._costs: deque[float] = deque(maxlen=9)
        self._ranks: Ranks | None = None

    def begin(self, step: int, parameter: Tensor, name: str) -> None:
        """Start the schedule: the coming step is measured.

        Args:
            step: number of the coming step.
            parameter: a parameter of the model, on the device that trains it.
            name: name of the measured model, the same in all ranks that train together.
        """
        if self._bound is None:
            return
        self._last = self._next = step  # step measured last, and next
        self._unpaid, self._unpaid_since = 1, step  # measured steps not yet compensated for
        self._times = step_times(parameter)
        self._ranks = Ranks(name)

    def forward_begins(self) -> None:
        """Record that the forward pass of a measured step begins."""
        if self._bound is not None:
            self._times.forward_begins()

    def step_ended(self, coming: int) -> bool:
        """Record the end of a step; return whether the coming step is to be measured."""
        if self._bound is None:
            return coming % self.interval == 0
        since = coming - self._last
        self._times.step_ended(measured=since == 1)
        if since == _READ:
            self._plan(self._bound)
            assert self._ranks is not None
            self._ranks.tell(self.interval, self._next)
        if since == _SHORTEST:
            assert self._ranks is not None
            told = self._ranks.told(self.interval, self._next)
            if told[1] >= coming:
                self.interval, self._next = told
        if since < _SHORTEST or coming < self._next:
            return False
        self._last = coming
        self._unpaid += 1
        return True

    def costs(self) -> list[float]:
        """Return the costs of measured steps so far, in plain steps."""
        return list(self._costs)

    def resume(self, costs: Iterable[float]) -> None:
        """Start from the costs of a resumed run; call this before `begin`."""
        self._costs.extend(costs)

    def end(self) -> None:
        """End the schedule, and remove the numbers published to other ranks."""
        if self._ranks is not None:
            self._ranks.end()

    def _plan(self, bound: float) -> None:
        """Set the interval, and the step to measure next."""
        if self._costs or self._unpaid > 1:  # after the first measured step plain steps are slow
            self._costs += self._times.costs()
        if len(self._costs) < 2:
            self._next = self._last + self._least
            return
        # The median, not the mean: other work in a measured step only lengthens it.
        self.interval = interval(median_low(self._costs), bound, self._least)
        paid = self._unpaid_since + self._unpaid * self.interval
        self._next = max(self._last + self.interval, paid)
        self._unpaid, self._unpaid_since = 0, self._next


def interval(cost: float, bound: float, least: int) -> int:
    """Return the smallest interval n at which measuring one step in n keeps to the bound.

    c/(n + c) ≤ x, hence n ≥ c(1/x − 1).

    Args:
        cost: c, the time that measuring adds, in plain steps.
        bound: x, the share of the training time, above 0 and below 1.
        least: lower bound of the result.
    """
    return max(least, math.ceil(cost * (1 / bound - 1)))
