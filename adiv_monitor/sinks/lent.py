"""Wrappers that let callbacks use the user's sinks without closing them."""

from collections.abc import Callable, Mapping, Sequence

from adiv_monitor.sinks.sink import Sink


class Lent:
    """Passes reports on to a sink, but leaves it open at `close`.

    A monitor closes its sinks, and several monitors may share one.

    Attributes:
        lent: the borrowed sink.
    """

    def __init__(self, sink: Sink) -> None:
        self.lent = sink
        self.write = sink.write
        self._flush = getattr(sink, "flush", None)
        self.add_losses: Callable[[Mapping[int, float]], None] = getattr(
            sink, "add_losses", _no_losses
        )

    def close(self) -> None:
        """Flush the sink; the user may continue to use it after the training."""
        if callable(self._flush):
            self._flush()


def _no_losses(losses: Mapping[int, float]) -> None:
    """Ignore the losses, for a sink that does not show them."""


def lent(sinks: Sequence[object], owner: str) -> tuple[Lent, ...]:
    """Wrap the sinks so that closing the wrappers leaves them open.

    Args:
        sinks: the sinks.
        owner: name of the class that they were passed to.

    Raises:
        TypeError: an entry is not a sink.
    """
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(
                f"{owner}(sinks=…): got a {type(sink).__name__}, expected objects with the "
                "methods write(report) and close()"
            )
    return tuple(Lent(sink) for sink in sinks if isinstance(sink, Sink))
