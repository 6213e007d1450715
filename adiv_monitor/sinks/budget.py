"""The time budget for output that shows the whole course of a training and is redrawn often."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 20


class Budget:
    """Allows output to take at most a twentieth of the time since the first report.

    Output is allowed only if the budget covers the time spent so far and twice the time of the last
    output: once for now, and once for the final one at the end of the training. The time of imports
    counts, as part of the first output.

    Args:
        first: estimated seconds of the first output, including imports.

    Attributes:
        spent: seconds spent so far.
    """

    def __init__(self, first: float) -> None:
        self._next = first
        self.spent = 0.0
        self._began: float | None = None  # clock time of the first call of `allows`

    def allows(self) -> bool:
        """Return whether the budget allows output now; the first call starts the clock."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        return _PATIENCE * (self.spent + 2 * self._next) <= now - self._began

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the body as spent, even if it fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._next = time.monotonic() - began
            self.spent += self._next
