"""Warns of a monitor that was never attached, although weights were changed."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.failures import Failures

_SAID = (
    "adiv_monitor: weights were changed, but their Monitor was never attached, so it has measured "
    "nothing: train inside `with Monitor(…) as monitor:`, or call its attach() before training and "
    "close() afterwards"
)


class Unattached:
    """A monitor that is not attached yet: it warns once it is collected, or the program ends.

    Args:
        weights: some parameters, to which training writes.
        failures: warns.
    """

    def __init__(self, weights: Sequence[Tensor], failures: Failures) -> None:
        self._given = weights, [*map(version, weights)], failures
        self._end = weakref.finalize(self, _check, *self._given)

    def __reduce__(self) -> Any:
        """Return what stands for it in a copy, whose tensors count from their own versions."""
        return Unattached, self._given[::2]

    def end(self) -> None:
        """Check no more: the monitor is attached, or closed."""
        self._given = (), [], self._given[2]
        self._end.detach()

    def check(self) -> None:
        """Warn once if weights were changed."""
        _check(*self._given)


def _check(weights: Sequence[Tensor], versions: list[int], failures: Failures) -> None:
    if [*map(version, weights)] != versions:
        failures.warn("never attached", _SAID)
