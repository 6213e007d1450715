"""Schedules of measured steps: at a fixed interval, or by a bound on their cost."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

# Numbers of steps from the start of a measured one until no more are timed, and until the next one
# at least. Then its cost is read, since a device may lag behind.
_READ, _SHORTEST = 8, 20
_FIRST, _LEAST = (10, 100), 100  # unless an interval was asked for: besides the first step


class Unasked(float):
    """A default that can be told from the same number given by the user."""


class Schedule:
    """Schedule that measures steps at an interval, or as often as a bound on its cost allows.

    The first step of a run is measured. Without `every_n_steps`, so are steps 10 and 100, at any
    cost: a short run has three reports, from which typical values can be told. Then those whose
    number is a multiple of the interval.

    The cost is known from the second measured step on, once the next one begins: the first includes
    everything that is slow in a new run. Plain steps are timed only in the few steps after a
    measured one. The interval changes with each report, which has the one of the first rank.

    Args:
        every_n_steps: the interval; with a bound the least one. None: 100.
        max_overhead: the bound on the share, above 0 and below 1; None: no bound, which an
            `Unasked` one is beside `every_n_steps`, too.

    Attributes:
        interval: present number of steps from one measured step to the next.
        turns: number of measured steps so far.
    """

    def __init__(self, every_n_steps: int | None, max_overhead: float | None) -> None:
        is_alone = every_n_steps is not None and isinstance(max_overhead, Unasked)
        self._bound = None if is_alone else max_overhead
        self._first = _FIRST if every_n_steps is None else ()
        self._least = every_n_steps or _LEAST
        if self._bound is not None:
            self._least = max(self._least, _SHORTEST)
        self.interval = self._least
        self.turns = 0
        self._measures = True  # the coming step, as the first
        self._costs: deque[float] = deque(maxlen=9)
        self._times: StepTimes | None = None  # None: no steps are timed
        self._next = 0  # number of the step to measure next
        self._asked = range(0)  # steps that are measured besides

    def begin(self, step: int, parameter: Tensor) -> None:
        """Start the schedule: the coming step is measured.

        Args:
            step: number of the coming step.
            parameter: a parameter of the model, on the device that trains it.
        """
        if self._bound is not None:
            self._last = step  # measured last
            self._times = step_times(parameter)
            self.reported(step, self.planned)

    @property
    def planned(self) -> int:
        """The interval that the costs so far allow."""
        if self._bound is None or not self._costs:
            return self.interval
        # The median, not the mean: other work in a measured step only lengthens it.
        return interval(median_low(self._costs), self._bound, self._least)

    def reported(self, step: int, interval: int | None) -> None:
        """Take the interval in the report of a step, which all ranks have."""
        if self._bound is not None and interval is not None:
            self.interval = interval
            self._next = self._after(step)

    def forward_begins(self) -> None:
        """Record that the forward pass of a measured step begins."""
        if self._times is not None:
            self._times.forward_begins()

    def step_ended(self, coming: int) -> bool:
        """Record the end of a step; return whether the coming step is to be measured."""
        self.turns += self._measures
        self._measures = self._is_due(coming) or coming in self._asked
        return self._measures

    def ask(self, step: int) -> None:
        """Measure the two steps after this one, too, unless this was asked an interval ago."""
        if not self._asked or step > self._asked[-1] + self.interval:
            self._asked = range(step + 1, step + 3)

    def _is_due(self, coming: int) -> bool:
        if self._times is None or self._bound is None:
            return coming % self.interval == 0 or coming in self._first
        if 1 < coming - self._last <= _READ:
            self._times.step_ended()
        if coming < self._next:
            return False
        self._costs += self._times.costs()
        self._last, self._next = coming, self._after(coming)
        self._times.begin()
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, with the costs of measured steps, in plain steps."""
        last = [] if self._times is None else self._times.costs()
        return {"costs": [*self._costs, *last], "turns": self.turns}

    def resume(self, costs: Iterable[float] = (), turns: int = 0) -> None:
        """Go on from a saved state; call this before `begin`."""
        self._costs.extend(costs)
        self.turns = turns

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


class StepTimes:
    """Timer of a measured step and of some plain ones after it. No device is ever waited for.

    A measured step is timed together with the next one, in which its report is completed.

    Args:
        now: sets a mark.
        passed: returns seconds between two marks; None until the device has reached both.
    """

    def __init__(self, now: Callable[[], Any], passed: Callable[[Any, Any], float | None]) -> None:
        self._now, self._passed = now, passed
        # Where a measured step begins, its forward pass begins, the next step ends, others end.
        self._marks: list[Any] = []

    def begin(self) -> None:
        """Set a mark at the beginning of a measured step."""
        self._marks = [self._now()]

    def forward_begins(self) -> None:
        """Set a mark in a measured step: the time before it may include an evaluation."""
        if len(self._marks) == 1:
            self._marks.append(self._now())

    def step_ended(self) -> None:
        """Set a mark at the end of a step after the measured one."""
        if len(self._marks) > 1:
            self._marks.append(self._now())

    def costs(self) -> list[float]:
        """Return the extra time of the measured step, in plain steps; [] if it is not known.

        A plain step is the median of those after it, since loading, evaluation and the like fall in
        between. Before the forward pass of a measured step they count as one plain step at most.
        """
        parts = [self._passed(*pair) for pair in pairwise(self._marks)]
        known = [part for part in parts if part is not None]
        if len(parts) < _READ or len(known) < len(parts):
            return []
        before, measured, *plain = known
        typical = median(plain)
        return [(min(before, typical) + measured) / typical - 2]


def step_times(parameter: Tensor) -> StepTimes:
    """Return a timer for the steps of a model with this parameter."""
    if not parameter.is_cuda:  # the device has done its work when Python goes on
        return StepTimes(time.perf_counter, _between)

    device = parameter.device

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def passed(start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        happened = start.query() and end.query()  # type: ignore[no-untyped-call]
        return start.elapsed_time(end) / 1000 if happened else None

    return StepTimes(now, passed)


def _between(start: float, end: float) -> float:
    return end - start
