"""Which steps are measured: at a fixed interval, or as many as a bound on their cost allows."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low
from typing import Protocol

from torch import Tensor

from adiv_monitor.step.ranks import Ranks
from adiv_monitor.step.times import step_times

# Steps from the start of a measured one until its cost is read, because a device may lag behind,
# and until all ranks know what the first made of it.
_READ, _SHORTEST = 8, 16


class Schedule(Protocol):
    """Says which steps are measured.

    Attributes:
        interval: steps from one measured step to the next, as it stands.
    """

    interval: int

    def begin(self, step: int, parameter: Tensor, name: str) -> None:
        """The coming step is measured.

        Args:
            step: its number.
            parameter: one of the model's, on the device that works.
            name: of what is measured, the same in all ranks that train together.
        """

    def forward_begins(self) -> None:
        """The forward pass of a measured step begins."""

    def step_ended(self, coming: int) -> bool:
        """Whether the coming step, of this number, is to be measured."""

    def costs(self) -> list[float]:
        """What measured steps were seen to cost, in plain steps."""

    def resume(self, costs: Iterable[float]) -> None:
        """Start from what they cost in the run that goes on; before `begin`."""

    def end(self) -> None:
        """No step is measured any more."""


def make_schedule(every_n_steps: int, max_overhead: float | None) -> Schedule:
    """The fixed interval, or if a share of the training time is given, one that keeps to it."""
    if max_overhead is None:
        return Regular(every_n_steps)
    return Bounded(every_n_steps, max_overhead)


class Regular:
    """Measures every step whose number is a multiple of the interval; there is no clock."""

    def __init__(self, every_n_steps: int) -> None:
        self.interval = every_n_steps

    def begin(self, step: int, parameter: Tensor, name: str) -> None:
        """Nothing has to be known of the run."""

    def forward_begins(self) -> None:
        """Nor of its steps."""

    def step_ended(self, coming: int) -> bool:
        """Whether the coming step, of this number, is to be measured."""
        return coming % self.interval == 0

    def costs(self) -> list[float]:
        """Nothing is known of them."""
        return []

    def resume(self, costs: Iterable[float]) -> None:
        """Nor has to be."""

    def end(self) -> None:
        """Nobody was told anything."""


class Bounded:
    """Measures as often as a bound on the monitor's share of the training time allows.

    What measuring costs shows in two steps, since all that is slow in a new run adds to the first:
    another follows at the least interval. What both have cost is then made up for by a longer wait.

    Args:
        every_n_steps: the least interval.
        max_overhead: the share, above 0 and below 1.
    """

    def __init__(self, every_n_steps: int, max_overhead: float) -> None:
        self.interval = self._least = max(every_n_steps, _SHORTEST)
        self._bound = max_overhead
        self._costs: deque[float] = deque(maxlen=9)
        self._ranks: Ranks | None = None

    def begin(self, step: int, parameter: Tensor, name: str) -> None:
        """The coming step is measured."""
        self._last = self._next = step  # step measured last, and next
        self._unpaid, self._unpaid_since = 1, step  # measured steps without a wait for them
        self._times = step_times(parameter)
        self._ranks = Ranks(name)

    def forward_begins(self) -> None:
        """The forward pass of a measured step begins."""
        self._times.forward_begins()

    def step_ended(self, coming: int) -> bool:
        """Whether the coming step, of this number, is to be measured."""
        since = coming - self._last
        self._times.step_ended(measured=since == 1)
        if since == _READ:
            self._plan()
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
        """What measured steps were seen to cost, in plain steps."""
        return list(self._costs)

    def resume(self, costs: Iterable[float]) -> None:
        """Start from what they cost in the run that goes on; before `begin`."""
        self._costs.extend(costs)

    def end(self) -> None:
        """No step is measured any more."""
        if self._ranks is not None:
            self._ranks.end()

    def _plan(self) -> None:
        """Set the interval, and the step to measure next."""
        if self._costs or self._unpaid > 1:  # right after the first, even plain steps are slow
            self._costs += self._times.costs()
        if len(self._costs) < 2:
            self._next = self._last + self._least
            return
        # Not the mean: what else falls into a measured step only lengthens it.
        self.interval = interval(median_low(self._costs), self._bound, self._least)
        paid = self._unpaid_since + self._unpaid * self.interval
        self._next = max(self._last + self.interval, paid)
        self._unpaid, self._unpaid_since = 0, self._next


def interval(cost: float, bound: float, least: int) -> int:
    """Smallest interval n at which measuring one step in n takes no more than its share.

    c/(n + c) ≤ x, hence n ≥ c(1/x − 1).

    Args:
        cost: c, the time that measuring adds, in plain steps.
        bound: x, the share of the training time, above 0 and below 1.
        least: the interval that is short enough.
    """
    return max(least, math.ceil(cost * (1 / bound - 1)))
