"""Eager execution of compiled models while a monitor is armed, so that inner hooks fire."""

import atexit
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
from torch._higher_order_ops import utils as operators

from adiv_monitor.rerun.thread import function_modes, set_function_modes

_OURS = "adiv_monitor."
# Monitors may live in several threads, and may be dropped without being closed.
_holders: set[weakref.ref["forced_eager"]] = set()
_outside: Any = None  # the stance before the first holder; None while there is no holder


class forced_eager:
    """Context in which compiled models run eagerly; their compiled code is kept for afterwards.

    Monitors of several optimizers overlap without being nested. The first one that enters sets the
    stance, and the last one that leaves, or is garbage-collected, restores it. An interrupted
    operation can be repeated.
    """

    def __enter__(self) -> None:
        _holders.add(weakref.ref(self, _leave))
        _settle()

    def __exit__(self, *error: object) -> None:
        _leave(weakref.ref(self))


def _leave(holder: weakref.ref[forced_eager]) -> None:
    _holders.discard(holder)
    _settle()


def _settle() -> None:
    """Set the stance to eager if there are holders, and restore it if there are none."""
    global _outside
    while bool(_holders) is (_outside is None):  # another thread may change it meanwhile
        from torch._dynamo import eval_frame  # imported late, as it loads the compiler

        if _holders:
            _outside = eval_frame._stance
            torch.compiler.set_stance("force_eager")
            _replace(_prepared, _compiling)
        else:
            eval_frame._set_stance(_outside)
            _outside = None
            _replace(_compiling, _prepared)


_prepared = operators._set_compilation_env


@contextmanager
def _compiling() -> Iterator[None]:
    """Prepare torch to compile an operator such as `torch.cond`, with the stance of before.

    These operators lift what their branches close over by an inner `torch.compile`. Run eagerly,
    they would lose the gradients of parameters. A monitor's mode, into which it would look, is off.
    """
    from torch._dynamo import eval_frame

    modes = function_modes()
    with _prepared():
        eager = eval_frame._set_stance(eval_frame._stance if _outside is None else _outside)
        set_function_modes([mode for mode in modes if not type(mode).__module__.startswith(_OURS)])
        try:
            yield
        finally:
            set_function_modes(modes)
            eval_frame._set_stance(eager)


_USERS: list[Any] = [  # older torch imports it by name
    module
    for name, module in sys.modules.items()
    if name.startswith("torch._higher_order_ops.") and "_set_compilation_env" in vars(module)
]


def _replace(usual: object, other: object) -> None:
    for module in _USERS:
        if module._set_compilation_env is usual:  # else other code has set it
            module._set_compilation_env = other


@atexit.register
def _leave_all() -> None:
    """Restore the stance for monitors that were not closed, while torch still can."""
    _holders.clear()
    _settle()


def in_compiled_code() -> bool:
    """Whether the caller is called by code of `torch.compile`, even if it runs eagerly.

    That code is compiled for the present hooks of the modules; other hooks would recompile it.
    """
    from torch._dynamo.eval_frame import OptimizeContext  # imported late: loads the compiler

    # Several decorators share that file; frames of this one hold an `OptimizeContext`.
    return any(
        frame.f_globals.get("__name__") == OptimizeContext.__module__
        and isinstance(frame.f_locals.get("self"), OptimizeContext)
        for frame, _ in walk_stack(sys._getframe())
    )
