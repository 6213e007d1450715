"""The course of a training so far, for output that shows all of it and is redrawn often."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import StepReport

_PATIENCE = 20


class Course:
    """Collects reports, and allows output at most a twentieth of the time since the first one.

    Output is allowed only if that covers the time spent so far and twice the time of the last
    output: once for now, and once for the final one at the end of the training. The time of imports
    counts, as part of the first output.

    Args:
        first: estimated seconds of the first output, including imports.

    Attributes:
        running: the training so far.
        count: number of reports, and of additions of losses.
        shown: the same, when output was last made.
        spent: seconds spent on output so far.
    """

    def __init__(self, first: float) -> None:
        self.running = Running()
        self.count = self.shown = 0
        self._next, self.spent = first, 0.0  # seconds
        self._began: float | None = None  # clock time of the first report

    def add(self, report: StepReport) -> bool:
        """Add a report; return whether there is time for output now."""
        self.running.add(report)
        self.count += 1
        now = time.monotonic()
        if self._began is None:
            self._began = now
        return _PATIENCE * (self.spent + 2 * self._next) <= now - self._began

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        self.running.add_losses(losses)
        self.count += bool(self.count)  # no output shows these losses yet

    @property
    def is_behind(self) -> bool:
        """Whether there is something that no output shows yet."""
        return self.shown < self.count

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Mark all reports as shown after the body; time a failure, so that a retry waits."""
        began = time.monotonic()
        try:
            yield
            self.shown = self.count
        finally:
            self._next = time.monotonic() - began
            self.spent += self._next
