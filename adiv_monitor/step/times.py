"""Durations of steps, read without ever waiting for the device."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Generic, TypeVar

import torch
from torch import Tensor

Mark = TypeVar("Mark")


class StepTimes(Generic[Mark]):
    """Timer of some steps, each from the end of the previous step to its own end.

    A measured step is timed together with the next one, in which its report is completed.

    Args:
        now: sets a mark.
        passed: returns seconds between two marks; None until the device has reached both.
    """

    def __init__(
        self, now: Callable[[], Mark], passed: Callable[[Mark, Mark], float | None]
    ) -> None:
        self._now, self._passed = now, passed
        self._marks = [now()]  # marks of the current step
        self._is_open = False  # whether a measured step has ended, and the next one has not
        self._waiting: deque[tuple[deque[list[float]], list[Mark]]] = deque()
        self._plain: deque[list[float]] = deque(maxlen=32)
        self._measured: deque[list[float]] = deque(maxlen=32)

    def begin(self) -> None:
        """Set a mark at the beginning of a measured step, if those before it were not timed."""
        self._marks = [self._now()]

    def forward_begins(self) -> None:
        """Set a mark in a measured step: the time before it may include an evaluation."""
        self._marks.append(self._now())

    def step_ended(self, *, measured: bool) -> None:
        """Set a mark, and read the marks that the device has reached."""
        if measured:
            self._is_open = True
            return
        self._marks.append(self._now())
        self._waiting.append((self._measured if self._is_open else self._plain, self._marks))
        self._marks, self._is_open = self._marks[-1:], False
        while self._waiting:
            times, marks = self._waiting[0]
            parts = [self._passed(*pair) for pair in pairwise(marks)]
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


def is_captured() -> bool:
    """Return whether a CUDA graph is captured here, in which events may not be asked anything."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_used and torch.cuda.is_current_stream_capturing())


def step_times(parameter: Tensor) -> StepTimes[float] | StepTimes[torch.cuda.Event]:
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
