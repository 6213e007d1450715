"""Exceptions while measuring: reported once, kept out of the training loop, never ignored."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

from adiv_monitor.capture.hook import is_captured
from adiv_monitor.errors import AlarmError
from adiv_monitor.printable import printable

_CAPTURED = (
    "a step of the optimizer is captured in a CUDA graph, whose replays run no hooks: they are "
    "neither measured nor counted; a step that is taken without the graph is"
)
_logger = logging.getLogger("adiv_monitor")


class Failures:
    """Handler of a monitor's exceptions, with a record of the warnings given.

    Args:
        on_error: "warn": warn once and let training go on; "raise": raise.

    Attributes:
        switched_off: path → why the layer is not measured any more.
        notes: sentences for the next report.
    """

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self._on_error = on_error
        self._warned: set[str] = set()
        self.switched_off: dict[str, str] = {}
        self.notes: list[str] = []

    def safely(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's body, keeping its exceptions out of the training loop.

        Raises:
            AlarmError: the training is to stop; this is no failure.
        """
        try:
            return action(*args)
        except AlarmError:
            raise
        except Exception as error:
            self.lost(error)
            return None

    def lost(self, error: Exception) -> None:
        """Handle an exception by which a step lacks its report or a part of it."""
        self.notes.append(self.handle(error, "The monitor failed"))

    def switch_off(self, path: str, error: Exception) -> None:
        """Handle an exception while measuring a layer: never measure it again, and warn."""
        where = f"layer '{path}': "
        said = self.handle(error, f"{where}measuring it failed", "")
        self.switched_off[path] = said.removeprefix(where)

    def tell(self, subject: str, error: Exception) -> None:
        """Handle an exception in a part of a step, which the report's notes mention."""
        self.handle(error, f"{subject}: measuring it failed")

    def guard_sink(self, sink: object, action: Callable[..., None], *args: object) -> str:
        """Run a sink's method; return a sentence for the report if it fails, else ""."""
        try:
            action(*args)
        except Exception as error:
            name = type(getattr(sink, "borrowed", sink)).__name__
            return self.handle(error, f"{name} failed", of=id(sink))
        return ""

    def handle(
        self, error: Exception, what: str, then: str = "; training goes on", of: int = 0
    ) -> str:
        """Warn, once, of what failed, or raise the exception; return what was said.

        Args:
            error: the exception.
            what: sentence on what failed.
            then: its end.
            of: which of several that the sentence fits.
        """
        if self._on_error == "raise":
            raise error
        said = f"{what}: {type(error).__name__}: {error}"
        self.warn(f"{what} {of}", f"adiv_monitor: {said}{then}")
        return said

    def tell_of_capture(self) -> bool:
        """Return whether a CUDA graph captures what runs here; if so, warn."""
        if captured := is_captured():
            self.warn("captured", f"adiv_monitor: {_CAPTURED}")
        return captured

    def warn(self, subject: str, message: str) -> None:
        """Warn, but only once about each subject."""
        if subject in self._warned:
            return
        self._warned.add(subject)
        message = printable(message)
        try:
            warnings.warn(message, stacklevel=2)
        except Warning:  # warnings are errors: do not raise in the middle of a training step
            if self._on_error == "raise":
                raise
            _logger.warning(message)
