"""Durations of steps, read without ever waiting for the device."""

import time
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """Clock that measures the time between two marks."""

    def now(self) -> Mark:
        """Set a mark."""

    def passed(self, start: Mark, end: Mark) -> float | None:
        """Return seconds between two marks; None until the device has reached both."""


class HostClock:
    """Clock for devices that have done their work when Python goes on."""

    def now(self) -> float:
        """Return seconds of a monotonic clock."""
        return time.perf_counter()

    def passed(self, start: float, end: float) -> float:
        """Return seconds between two marks."""
        return end - start


class DeviceClock:
    """Clock for a GPU, whose work is queued asynchronously, by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        """Record an event in the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return seconds between two events; None until both have happened."""
        happened = start.query() and end.query()  # type: ignore[no-untyped-call]
        return start.elapsed_time(end) / 1000 if happened else None


class StepTimes(Generic[Mark]):
    """Timer of steps, each from the end of the previous step to its own end.

    A measured step is timed together with the next one, in which its report is completed.
    """

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock = clock
        self._marks = [clock.now()]  # marks of the current step
        self._is_open = False  # whether a measured step has ended, and the next one has not
        self._waiting: deque[tuple[deque[list[float]], list[Mark]]] = deque()
        self._plain: deque[list[float]] = deque(maxlen=32)
        self._measured: deque[list[float]] = deque(maxlen=32)

    def forward_begins(self) -> None:
        """Set a mark in a measured step: the time before it may include an evaluation."""
        self._marks.append(self._clock.now())

    def step_ended(self, *, measured: bool) -> None:
        """Set a mark, and read the marks that the device has reached."""
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
        """Return the extra time of each measured step since the last call, in plain steps.

        A plain step is the median of the last ones, since loading, evaluation and the like fall in
        between. Before the forward pass of a measured step they count as one plain step at most.
        """
        if not self._plain:
            return []
        plain = median(sum(parts) for parts in self._plain)
        costs = [(min(before, plain) + sum(rest)) / plain - 2 for before, *rest in self._measured]
        self._measured.clear()
        return costs


def step_times(parameter: Tensor) -> StepTimes[float] | StepTimes[torch.cuda.Event]:
    """Return a timer for the steps of a model with this parameter."""
    if parameter.is_cuda:
        return StepTimes(DeviceClock(parameter.device))
    return StepTimes(HostClock())
