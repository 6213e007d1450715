"""Adds room on Python's stack for hooks, so that training has as much room as without them."""

import sys
import weakref

# The frames that the monitor's deepest hook needs, sinks included. A module with hooks takes one
# frame more than one without, because torch calls its forward through a further function.
FRAMES = 200

_held: dict[weakref.ref["Room"], int] = {}
# The limit set by others, and our values that may be in force; None: the limit was not changed.
_limits: tuple[int, set[int]] | None = None


class Room:
    """Frames added to Python's recursion limit, which all threads share.

    The largest of several rooms counts, because hooks on one module run one after another. A
    deleted room no longer counts.
    """

    def make(self, frames: int) -> None:
        """Add this many frames from now on."""
        _held[weakref.ref(self, _leave)] = frames
        _settle()

    def leave(self) -> None:
        """Add no frames any more; if this call is interrupted, it can be repeated."""
        _leave(weakref.ref(self))


def _leave(room: weakref.ref[Room]) -> None:
    _held.pop(room, None)
    _settle()


def _settle() -> None:
    global _limits
    limit = sys.getrecursionlimit()
    # Other code has set any other value.
    own = _limits[0] if _limits is not None and limit in _limits[1] else limit
    wanted = own + max(_held.values(), default=0)
    if limit != wanted:
        _limits = own, {limit, wanted}  # stored first, since the change may be interrupted
        try:
            sys.setrecursionlimit(wanted)
        except RecursionError:  # the stack is too deep now; the next call lowers it
            return
    if not _held:
        _limits = None
