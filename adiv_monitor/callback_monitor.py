"""A monitor in the hands of a Trainer: it stops when it is asked to, not by an exception."""

import logging
from typing import Any

from adiv_monitor.errors import AlarmError
from adiv_monitor.monitor import Monitor
from adiv_monitor.printable import printable

_logger = logging.getLogger("adiv_monitor")


class CallbackMonitor(Monitor):
    """Where a `Monitor(on_alarm="stop")` would raise, this one only keeps why.

    Attributes:
        alarmed: what would have been raised first; None: nothing so far. With several processes it
            is there in all of them in the same optimizer step, or in none.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.alarmed: AlarmError | None = None

    def _stop(self, error: AlarmError) -> None:
        self.alarmed = self.alarmed or error


def tell_why(error: AlarmError) -> None:
    """One line of the logger `adiv_monitor`: the training stops, and by which alarms."""
    _logger.warning("%s", printable(f"adiv-monitor: training stops: {error}"))
