"""Compiled models run eagerly while anything is armed: hooks of inner modules fire only then."""

import atexit
import sys
import weakref
from types import FrameType
from typing import Any

import torch

from adiv_monitor.rerun.thread import surely

# Monitors may be in several threads, and dropped without being closed.
_holders: set[weakref.ref["forced_eager"]] = set()
_outside: Any = None  # the stance that was there before the first of them; None: it is there


class forced_eager:
    """Holds compiled code back; what is already compiled stays so and is used again afterwards.

    Monitors of several optimizers overlap without being nested, so the first one that enters sets
    the stance and the last one that leaves, or is gone, puts it back. What was interrupted can be
    done again.
    """

    def __enter__(self) -> None:
        _holders.add(weakref.ref(self, _leave))
        _settle()

    def __exit__(self, *error: object) -> None:
        surely(self.leave)

    def leave(self) -> None:
        """Hold it back no more, if it is."""
        _leave(weakref.ref(self))


def _leave(holder: weakref.ref[forced_eager]) -> None:
    _holders.discard(holder)
    _settle()


def _settle() -> None:
    """Let the stance be that of whether there are holders."""
    global _outside
    while bool(_holders) is (_outside is None):  # in another thread it may be settled as well
        from torch._dynamo import eval_frame  # loads the compiler: not on import

        if _holders:
            _outside = eval_frame._stance
            torch.compiler.set_stance("force_eager")
        else:
            eval_frame._set_stance(_outside)
            _outside = None


@atexit.register
def _leave_all() -> None:
    """Of monitors that nobody closed: later torch can't any more."""
    _holders.clear()
    _settle()


def in_compiled_code() -> bool:
    """Whether the caller is called by code that `torch.compile` made, held back though it may be.

    That code is compiled for the hooks that are on the modules; others would have it recompiled.
    """
    from torch._dynamo.eval_frame import OptimizeContext  # loads the compiler: not on import

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Of several decorators in that file, this one's frames hold its context.
        if frame.f_globals.get("__name__") == OptimizeContext.__module__ and isinstance(
            frame.f_locals.get("self"), OptimizeContext
        ):
            return True
        frame = frame.f_back
    return False
