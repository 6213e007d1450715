"""Sinks that a callback uses but does not own."""

from collections.abc import Sequence

from adiv_monitor.sinks.sink import Sink, check_sinks


class BorrowedSink:
    """Passes reports on to a sink and leaves it open: several monitors may write to the same sink.

    Attributes:
        borrowed: the sink.
    """

    def __init__(self, sink: Sink) -> None:
        self.borrowed = sink
        self.write = sink.write
        self.add_losses = getattr(sink, "add_losses", None)

    def close(self) -> None:
        """Flush the sink; the user may go on with it after the training."""
        getattr(self.borrowed, "flush", lambda: None)()

    def of(self, name: str) -> "BorrowedSink":
        """Return the sink of one of several monitors; a page of its own, if it writes one."""
        named = getattr(self.borrowed, "named", None)
        return BorrowedSink(named(name)) if name and named else self


def borrowed(sinks: Sequence[Sink], owner: str) -> tuple[BorrowedSink, ...]:
    """The sinks, wrapped so that closing the wrapper leaves them open.

    Raises:
        TypeError: one of them is not a sink; `owner` is the class that it was given to.
    """
    check_sinks(owner, sinks)
    return tuple(map(BorrowedSink, sinks))
