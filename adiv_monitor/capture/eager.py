"""Compiled models run eagerly while anything is armed: hooks of inner modules fire only then."""

import atexit
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

_holders = 0
_stance = ExitStack()
atexit.register(_stance.close)  # of monitors that nobody closed: later torch can't any more
_lock = threading.Lock()  # monitors may be in several threads


@contextmanager
def forced_eager() -> Iterator[None]:
    """Hold compiled code back; what is already compiled stays so and is used again afterwards.

    Monitors of several optimizers overlap without being nested, so the first one that enters sets
    the stance and the last one that leaves puts it back.
    """
    _hold(1)
    try:
        yield
    finally:
        _hold(-1)


def _hold(change: int) -> None:
    global _holders
    with _lock:
        if _holders == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _holders += change
        if _holders == 0:
            _stance.close()


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
