"""Warns of a monitor that was never attached, although weights were changed."""

import atexit
from collections.abc import Sequence
from weakref import WeakSet

from torch import Tensor

from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.failures import Failures

_SAID = (
    "adiv_monitor: weights were changed, but their Monitor was never attached, so it has measured "
    "nothing: train inside `with Monitor(…) as monitor:`, or call its attach() before training and "
    "close() afterwards"
)
_all: WeakSet["Unattached"] = WeakSet()


@atexit.register
def _check_all() -> None:
    """Check the monitors that exist at the end of the program, as not all are collected then."""
    for each in list(_all):
        each.check()


class Unattached:
    """A monitor that is not attached yet.

    Args:
        weights: some parameters, to which training writes.
        failures: warns.
    """

    def __init__(self, weights: Sequence[Tensor], failures: Failures) -> None:
        self._weights, self._failures = weights, failures
        self.follow()

    def follow(self) -> None:
        """Record the versions of the weights; copies of tensors count from their own."""
        self._versions = [*map(version, self._weights)]
        _all.add(self)

    def end(self) -> None:
        """Check no more: the monitor is attached, or closed."""
        self._weights = ()
        _all.discard(self)

    def check(self) -> None:
        """Warn once if weights were changed."""
        if self._weights and [*map(version, self._weights)] != self._versions:
            self._failures.warn("never attached", _SAID)
