"""Room on Python's stack for what hooks need of it: training has as much as without them."""

import sys
import weakref

# Those that the deepest of our hooks needs, sinks included. A module with hooks takes one more than
# one without: torch calls its forward by a further function.
FRAMES = 200

_held: dict[weakref.ref["Room"], int] = {}
# The limit that is not ours, and what may be set in its place by now; None: it was not changed.
_limits: tuple[int, set[int]] | None = None


class Room:
    """Frames added to Python's limit, which is one for all threads.

    Of several the largest counts: hooks on one module run one after another. One that is gone has
    left.
    """

    def make(self, frames: int) -> None:
        """From now on, have so many."""
        _held[weakref.ref(self, _leave)] = frames
        _settle()

    def leave(self) -> None:
        """Have none; if that is interrupted, it can be done again."""
        _leave(weakref.ref(self))


def _leave(room: weakref.ref[Room]) -> None:
    _held.pop(room, None)
    _settle()


def _settle() -> None:
    global _limits
    limit = sys.getrecursionlimit()
    # Another value is somebody else's.
    own = _limits[0] if _limits is not None and limit in _limits[1] else limit
    wanted = own + max(_held.values(), default=0)
    if limit != wanted:
        _limits = own, {limit, wanted}  # known before it is done, which may be interrupted
        try:
            sys.setrecursionlimit(wanted)
        except RecursionError:  # too deep in the stack to lower it: the next one will
            return
    if not _held:
        _limits = None
