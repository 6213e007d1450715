"""The protocol of a sink."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from adiv_monitor.report import StepReport


@runtime_checkable
class Sink(Protocol):
    """An object that receives reports.

    A sink may also have `flush()`, if it holds something back: callbacks, which leave the user's
    sinks open, call it when a training ends; `add_losses(losses)`, if it shows the loss: it is
    called before the end with the losses, by step, of the steps after the last report; `place`, a
    path or an address that the line at the end of a run names; and `named(name)`, if it shows one
    monitor alone: a callback with several optimizers asks for the sink of each by it.

    The monitor treats an exception from `write` as its `on_error` says.
    """

    def write(self, report: StepReport) -> None:
        """Receive the report of one step."""

    def close(self) -> None:
        """Finish; nothing is written afterwards, and a second call does nothing."""


def check_sinks(owner: str, sinks: object) -> None:
    """Raise TypeError if something else than a list of sinks was given to a class."""
    given = sinks if isinstance(sinks, Sequence) else [None]
    if not all(isinstance(sink, Sink) and not isinstance(sink, type) for sink in given):
        raise TypeError(
            f"{owner}(sinks=…): got {sinks!r}, expected a list of objects with the methods "
            "write(report) and close()"
        )
