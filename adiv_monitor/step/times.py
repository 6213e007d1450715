"""How long steps take, read without ever waiting for the device."""

import time
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """Tells the time that passes between two marks."""

    def now(self) -> Mark:
        """Set a mark."""

    def passed(self, start: Mark, end: Mark) -> float | None:
        """Seconds between two marks; None as long as the device has not come to the second."""


class HostClock:
    """For devices that have done their work when Python goes on."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.perf_counter()

    def passed(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start


class DeviceClock:
    """For a GPU, which is told what to do ahead of time: events among its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """An event at this place of the device's work."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Seconds between two events; None as long as they have not both happened."""
        happened = start.query() and end.query()  # type: ignore[no-untyped-call]
        return start.elapsed_time(end) / 1000 if happened else None


class StepTimes(Generic[Mark]):
    """Times steps, each from the end of the one before it to its own.

    A measured step is timed together with the one after it, in which its report is completed.
    """

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock = clock
        self._marks = [clock.now()]  # of the step under way
        self._is_open = False  # a measured step has ended, the one after it has not
        self._waiting: deque[tuple[deque[list[float]], list[Mark]]] = deque()
        self._plain: deque[list[float]] = deque(maxlen=32)
        self._measured: deque[list[float]] = deque(maxlen=32)

    def forward_begins(self) -> None:
        """Set a mark in a measured step: what came before may be an evaluation, too."""
        self._marks.append(self._clock.now())

    def step_ended(self, *, measured: bool) -> None:
        """Set a mark, and read those that the device has come to."""
        if measured:
            self._is_open = True
            return
        self._marks.append(self._clock.now())
        self._waiting.append((self._measured if self._is_open else self._plain, self._marks))
        self._marks, self._is_open = self._marks[-1:], False
        while self._waiting:
            times, marks = self._waiting[0]
            parts = [self._clock.passed(*pair) for pair in pairwise(marks)]
            seconds = [part for part in parts if part is not None]
            if len(seconds) < len(parts):
                break
            times.append(seconds)
            self._waiting.popleft()

    def costs(self) -> list[float]:
        """What each measured step since the last call took longer, in plain steps.

        A plain step is the median of the last ones: loading, evaluation and the like come between.
        Before the forward pass of a measured step they count as one plain step at most.
        """
        if not self._plain:
            return []
        plain = median(sum(parts) for parts in self._plain)
        costs = [(min(before, plain) + sum(rest)) / plain - 2 for before, *rest in self._measured]
        self._measured.clear()
        return costs


def step_times(parameter: Tensor) -> StepTimes[float] | StepTimes[torch.cuda.Event]:
    """Times for steps of a model that has this parameter."""
    if parameter.is_cuda:
        return StepTimes(DeviceClock(parameter.device))
    return StepTimes(HostClock())
