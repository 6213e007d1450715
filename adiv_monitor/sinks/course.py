"""Sinks that show the whole training so far, and are redrawn while it goes on."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import StepReport

_PATIENCE = 20


class CourseSink(ABC):
    """Collects reports, and shows them for at most a twentieth of the time since the first one.

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

    @abstractmethod
    def show(self) -> None:
        """Output what the reports so far show."""

    def write(self, report: StepReport) -> None:
        """Add the report, and show all if that is due."""
        if self.add(report):
            self.flush()

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

    def flush(self) -> None:
        """Show all reports so far, if something is not shown yet."""
        if self.shown == self.count:
            return
        began = time.monotonic()
        try:
            self.show()
            self.shown = self.count
        finally:  # the time of a failure counts, so that a retry waits
            self._next = time.monotonic() - began
            self.spent += self._next

    def close(self) -> None:
        """Show the whole training; whatever the sink was given stays open."""
        self.flush()
