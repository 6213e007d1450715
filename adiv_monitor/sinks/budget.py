"""How often what shows the whole course of a training may be made anew while it goes on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 20


class Budget:
    """A twentieth of the time since the first report.

    Something is made only when all that was spent, and twice what it took the last time, lies
    within this: once for now, and once for the end of the training, when it is made anew. What is
    imported for it counts, as it is a part of what the first time takes.

    Args:
        first: seconds that the first time takes, by estimate, imports included.

    Attributes:
        spent: seconds so far.
    """

    def __init__(self, first: float) -> None:
        self._next = first
        self.spent = 0.0
        self._began: float | None = None  # of the clock

    def allows(self) -> bool:
        """Whether there is enough; the first question begins the time."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        return _PATIENCE * (self.spent + 2 * self._next) <= now - self._began

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What is done here is paid for; what fails takes its time, too."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._next = time.monotonic() - began
            self.spent += self._next
