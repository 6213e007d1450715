"""Sinks of the user's in the hands of a callback."""

from collections.abc import Callable, Mapping, Sequence

from adiv_monitor.sinks.sink import Sink


class Lent:
    """Passes reports on, but stays open: a monitor closes its sinks, and there may be several.

    Attributes:
        lent: the sink.
    """

    def __init__(self, sink: Sink) -> None:
        self.lent = sink
        self.write = sink.write
        self._flush = getattr(sink, "flush", None)
        self.add_losses: Callable[[Mapping[int, float]], None] = getattr(
            sink, "add_losses", _no_losses
        )

    def close(self) -> None:
        """Let it write what it holds back; the user may go on with it after the training."""
        if callable(self._flush):
            self._flush()


def _no_losses(losses: Mapping[int, float]) -> None:
    """A sink that does not show losses."""


def lent(sinks: Sequence[object], owner: str) -> tuple[Lent, ...]:
    """The sinks, each so that whoever closes it leaves it open.

    Raises:
        TypeError: when one is no sink; `owner` is the class that it was given to.
    """
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(
                f"{owner}(sinks=…): got a {type(sink).__name__}, expected objects with the "
                "methods write(report) and close()"
            )
    return tuple(Lent(sink) for sink in sinks if isinstance(sink, Sink))
