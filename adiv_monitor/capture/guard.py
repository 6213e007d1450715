"""What stands between the bodies of hooks and the training that they are called by."""

from collections.abc import Callable
from typing import Any

from adiv_monitor.rerun.thread import ThreadState


class Guard:
    """Around everything that a training step calls while it is watched.

    What fails in there, outside of what belongs to one layer alone, leaves nothing of the step that
    could be trusted: nothing more is watched, and the step is given up.

    Args:
        fail: called with the exception, and may raise it.

    Attributes:
        broken: something has failed.
    """

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self.broken = False
        self._fail = fail

    def __call__(self, body: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook."""
        if self.broken:
            return
        state = ThreadState()
        try:
            body(*args)
        except Exception as error:
            state.put_back()
            self.failed(error)
        except BaseException:
            state.put_back()
            self.broken = True
            raise

    def failed(self, error: Exception) -> None:
        """Something has failed."""
        self.broken = True
        self._fail(error)


def call_all(*actions: Callable[[], object]) -> None:
    """Call all of them, in this order, whatever any of them raises; the last of that is raised."""
    failed: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:
            if error is not failed:
                error.__context__ = error.__context__ or failed
            failed = error
    if failed is not None:
        raise failed
