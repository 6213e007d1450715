"""Keeps failures in the bodies of hooks away from the training that calls the hooks."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from torch._C import DisableTorchFunction

from adiv_monitor.rerun.thread import apart, is_seen


def raised(*told: Any) -> None:
    """Raise the exception, which is the last argument."""
    raise told[-1]


class Guard:
    """Runs everything that a training step calls while it is watched.

    A failure in there that does not belong to one layer alone makes the whole step unreliable:
    nothing more is watched and the step is discarded.

    Args:
        fail: called with the exception; by default it is raised.

    Attributes:
        broken: whether something has failed.
    """

    def __init__(self, fail: Callable[[Exception], None] = raised) -> None:
        self.broken = False
        self._fail = fail

    def __call__(self, body: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook."""
        if self.broken:
            return
        try:
            with DisableTorchFunction(), apart(functions=False) if is_seen() else nullcontext():
                body(*args)
        except Exception as error:
            self.broken = True
            self._fail(error)
        except BaseException:
            self.broken = True
            raise


def call_all(*actions: Callable[[], object]) -> None:
    """Call all actions in order, even if some raise, and raise the last exception."""
    with ExitStack() as stack:
        for action in reversed(actions):
            stack.callback(action)
