"""The protocol of a sink."""

from typing import Protocol, runtime_checkable

from adiv_monitor.report import StepReport


@runtime_checkable
class Sink(Protocol):
    """Whatever takes reports.

    One that holds something back may have `flush()`, too: callbacks, which leave sinks of the
    user's open, call it when a training ends. One that shows the loss may have
    `add_losses(losses)`, by step, which is called before the end with those of the steps after the
    last report. One that people look at may have `place`, a path or
    an address, which the line at the end of a run names.

    An exception that leaves `write` is the monitor's business, which treats it as `on_error` says.
    """

    def write(self, report: StepReport) -> None:
        """Take the report of one step."""

    def close(self) -> None:
        """Finish: nothing is written afterwards. A second call does nothing."""
