"""What goes wrong while measuring: said once, kept out of the training loop, never passed over."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

from adiv_monitor.errors import AlarmError
from adiv_monitor.printable import printable

_logger = logging.getLogger("adiv_monitor")


class Failures:
    """Knows what a monitor does about exceptions, and what it has said of them.

    Args:
        on_error: "warn": warn once and let training go on; "raise": raise.

    Attributes:
        switched_off: path → why the layer must not be watched any more.
        notes: sentences for the next report.
    """

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self._on_error = on_error
        self._warned: set[str] = set()
        self.switched_off: dict[str, str] = {}
        self.notes: list[str] = []

    def safely(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's body; what fails there must not reach the training loop.

        Raises:
            AlarmError: is no failure: the training is to stop.
        """
        try:
            return action(*args)
        except AlarmError:
            raise
        except Exception as error:
            self.lost(error)
            return None

    def lost(self, error: Exception) -> None:
        """An exception that leaves a step without its report, or without some of it."""
        if self._on_error == "raise":
            raise error
        failure = f"The monitor failed: {type(error).__name__}: {error}"
        self.notes.append(failure)
        self.warn("step", f"adiv_monitor: {failure}; training goes on")

    def switch_off(self, path: str, error: Exception) -> None:
        """An exception while measuring a layer: never again, and say so."""
        if self._on_error == "raise":
            raise error
        self.switched_off[path] = f"measuring it failed: {type(error).__name__}: {error}"
        self.warn(path, f"adiv_monitor: layer '{path}': {self.switched_off[path]}")

    def tell(self, subject: str, error: Exception) -> None:
        """An exception in a part of a step, which the report's notes tell."""
        if self._on_error == "raise":
            raise error
        failure = f"measuring it failed: {type(error).__name__}: {error}"
        self.warn(subject, f"adiv_monitor: {subject}: {failure}; training goes on")

    def guard_sink(self, sink: object, action: Callable[[], None]) -> str | None:
        """Run a sink's method; its failure becomes a sentence in the report."""
        try:
            action()
        except Exception as error:
            name = type(getattr(sink, "borrowed", sink)).__name__
            return self.of_users(name, error, f"sink {id(sink)}")
        return None

    def of_users(self, name: str, error: Exception, subject: str) -> str:
        """An exception in what the user gave, of this name: a sentence for the report."""
        if self._on_error == "raise":
            raise error
        failure = f"{name} failed: {type(error).__name__}: {error}"
        self.warn(subject, f"adiv_monitor: {failure}; training goes on")
        return failure

    def warn(self, subject: str, message: str) -> None:
        """Warn of a subject once."""
        if subject in self._warned:
            return
        self._warned.add(subject)
        message = printable(message)
        try:
            warnings.warn(message, stacklevel=2)
        except Warning:  # where warnings are errors: not in the middle of somebody's training step
            if self._on_error == "raise":
                raise
            _logger.warning(message)
