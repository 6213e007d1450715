"""Schedules of measured steps: at a fixed interval, or by a bound on their cost."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median_low

from torch import Tensor

from adiv_monitor.step.ranks import tell, told, untell
from adiv_monitor.step.times import is_captured, step_times

# Numbers of steps from the start of a measured one until its cost is read, since a device may lag
# behind, and until all ranks know the interval that the first rank has set.
_READ, _SHORTEST = 8, 20
_FIRST, _LEAST = (10, 100), 100  # unless an interval was asked for: besides the first step


class Unasked(float):
    """A default that can be told from the same number given by the user."""


class Schedule:
    """Schedule that measures steps at an interval, or as often as a bound on its cost allows.

    The first step of a run is measured. Without `every_n_steps`, so are steps 10 and 100, at any
    cost: a short run has three reports, from which typical values can be told. Then those whose
    number is a multiple of the interval.

    The cost is known from the second measured step on: the first includes everything that is slow
    in a new run. Plain steps are timed only in the few steps after a measured one.

    Args:
        every_n_steps: the interval; with a bound the least one. None: 100.
        max_overhead: the bound on the share, above 0 and below 1; None: no bound, which an
            `Unasked` one is beside `every_n_steps`, too.

    Attributes:
        interval: present number of steps from one measured step to the next.
    """

    def __init__(self, every_n_steps: int | None, max_overhead: float | None) -> None:
        is_alone = every_n_steps is not None and isinstance(max_overhead, Unasked)
        self._bound = None if is_alone else max_overhead
        self._first = _FIRST if every_n_steps is None else ()
        self.interval = every_n_steps or _LEAST
        if self._bound is not None:
            self.interval = max(self.interval, _SHORTEST)
        self._least = self.interval
        self._costs: deque[float] = deque(maxlen=9)
        self._name: str | None = None  # of what is measured; None: no steps are timed
        self._next = 0  # number of the step to measure next

    def begin(self, step: int, parameter: Tensor, name: str) -> None:
        """Start the schedule: the coming step is measured.

        Args:
            step: number of the coming step.
            parameter: a parameter of the model, on the device that trains it.
            name: name of the measured model, the same in all ranks that train together.
        """
        if self._bound is None:
            return
        self._begun = self._last = step  # step measured first, and last
        self._times = step_times(parameter)
        self._name = name
        self._plan(self._bound, name)

    def forward_begins(self) -> None:
        """Record that the forward pass of a measured step begins."""
        if self._bound is not None and not is_captured():
            self._times.forward_begins()

    def step_ended(self, coming: int) -> bool:
        """Record the end of a step; return whether the coming step is to be measured."""
        if self._bound is None or self._name is None:
            return coming % self.interval == 0 or coming in self._first
        since = coming - self._last
        if since <= _READ and self._last > self._begun and not is_captured():
            self._times.step_ended(measured=since == 1)
            if since == _READ:
                self._costs += self._times.costs()
                self._plan(self._bound, self._name)
        if since == _SHORTEST:
            first = told(self._name, self.interval, self._next)
            if first[1] >= coming:
                self.interval, self._next = first
        if coming < self._next:
            return False
        self._last, self._next = coming, self._after(coming)
        if not is_captured():
            self._times.begin()
        return True

    def costs(self) -> list[float]:
        """Return the costs of measured steps so far, in plain steps."""
        return list(self._costs)

    def resume(self, costs: Iterable[float]) -> None:
        """Start from the costs of a resumed run; call this before `begin`."""
        self._costs.extend(costs)

    def end(self) -> None:
        """End the schedule, and remove the numbers published to other ranks."""
        if self._name is not None:
            untell(self._name)

    def _plan(self, bound: float, name: str) -> None:
        """Set the interval, and the step to measure next, by the costs so far; tell the ranks."""
        if self._costs:
            # The median, not the mean: other work in a measured step only lengthens it.
            self.interval = interval(median_low(self._costs), bound, self._least)
        self._next = self._after(self._last)
        tell(name, self.interval, self._next)

    def _after(self, step: int) -> int:
        """Return the step to measure after this one, by the present interval."""
        regular = -(-(step + _SHORTEST) // self.interval) * self.interval
        return min([regular, *(first for first in self._first if first >= step + _FIRST[0])])


def interval(cost: float, bound: float, least: int) -> int:
    """Return the smallest interval n at which measuring one step in n keeps to the bound.

    c/(n + c) ≤ x, hence n ≥ c(1/x − 1), rounded up to 1, 2 or 5 times a power of ten.

    Args:
        cost: c, the time that measuring adds, in plain steps.
        bound: x, the share of the training time, above 0 and below 1.
        least: lower bound of the result.
    """
    exact = max(math.ceil(cost * (1 / bound - 1)), 1)
    power: int = 10 ** (len(str(exact)) - 1)
    rounded = next(n * power for n in (1, 2, 5, 10) if n * power >= exact)
    return max(least, rounded)
