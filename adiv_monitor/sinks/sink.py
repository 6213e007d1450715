"""The protocol of a sink."""

from typing import Protocol, runtime_checkable

from adiv_monitor.report import StepReport


@runtime_checkable
class Sink(Protocol):
    """An object that accepts reports.

    A sink that buffers may also have `flush()`: callbacks leave sinks of the user's open and call
    it when a training ends. A sink that shows the loss may have `add_losses(losses)`, with losses
    by step, which is called before the end with those of the steps after the last report. A sink
    with output for people may have `place`, a path or an address, which the closing line of a run
    names.

    The monitor handles exceptions from `write` according to `on_error`.
    """

    def write(self, report: StepReport) -> None:
        """Accept the report of one step."""

    def close(self) -> None:
        """Finish: no report is written afterwards. A second call has no effect."""
