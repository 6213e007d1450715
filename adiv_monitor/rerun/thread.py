"""Thread-local settings of torch: saved and restored, even if a KeyboardInterrupt hits.

An interrupt may arrive between any two byte codes, and a `with` does not protect the call of its
own `__exit__`. Every restoring operation here can therefore be repeated, and is repeated if it was
interrupted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

R = TypeVar("R")


class ThreadState:
    """Torch's settings in this thread, to restore if an interrupt kept a `with` from doing so.

    As a context manager, it restores them if an exception leaves the block.

    Args:
        whole: save autocast's settings even if autocast is off. Needed for reruns of forward
            passes, which turn on the autocast that they had; nothing else here turns it on.
    """

    __slots__ = ("_autocast", "_caches", "_dual_level", "_gradients", "_nesting", "_overrides")

    def __init__(self, *, whole: bool = False) -> None:
        self._gradients = torch.is_grad_enabled()
        self._overrides = torch._C._is_torch_function_enabled()
        self._dual_level = forward_ad._current_level
        self._autocast: list[tuple[str, bool, torch.dtype]] | None = None
        if not whole and not torch._C._is_any_autocast_enabled():
            return
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _KINDS
        ]
        self._caches = torch.is_autocast_cache_enabled()
        _, self._nesting = map(_CALL, _NESTING)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.put_back()

    def put_back(self) -> None:
        """Restore the settings; after an interrupt, it can be called again."""
        torch._C._set_grad_enabled(self._gradients)
        if self._overrides and not torch._C._is_torch_function_enabled():
            _ENABLED.__exit__(None, None, None)
        for kind, enabled, dtype in self._autocast or ():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._autocast is not None:
            torch.set_autocast_cache_enabled(self._caches)
            while [*map(_CALL, _NESTING)][1] > self._nesting:  # otherwise its cache would stay
                torch.autocast_decrement_nesting()
        while forward_ad._current_level > self._dual_level:
            forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


# Only the exit of a `DisableTorchFunction` context can enable torch functions again.
_ENABLED = torch._C.DisableTorchFunction()
_ENABLED.__enter__()
_ENABLED.__exit__(None, None, None)
_KINDS = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
# Only a change returns autocast's nesting depth; one byte code increments and decrements it.
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_CALL: Callable[[Callable[[], int]], int] = type(torch.autocast_increment_nesting).__call__


def function_modes() -> list[TorchFunctionMode]:
    """Return the torch function modes that are active in this thread, the outermost first."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def set_function_modes(wanted: Sequence[TorchFunctionMode]) -> None:
    """Make these the only active modes; after an interrupt, it can be called again.

    A mode with a true attribute `ended` is left out: it ended while it was suspended.
    """
    wanted = [mode for mode in wanted if not getattr(mode, "ended", False)]
    modes = function_modes()
    alike = 0
    while alike < min(len(modes), len(wanted)) and modes[alike] is wanted[alike]:
        alike += 1
    for _ in modes[alike:]:
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in wanted[alike:]:
        _push_mode(mode)  # type: ignore[no-untyped-call]


def apart(*, functions: bool = False) -> AbstractContextManager[None]:
    """Return a context for what the monitor computes: the training's modes do not see it.

    Dispatch modes are suspended, unless one of them traces; so are hooks on the tensors that
    autograd saves. Otherwise selective checkpointing would cache what the monitor computes, and a
    mode that draws random numbers would draw more of them.

    Args:
        functions: also suspend function modes.
    """
    modes = function_modes() if functions else []
    return _Apart(modes) if modes or is_seen() else _AS_IT_IS


def run_apart(body: Callable[..., R], *args: Any, functions: bool = False) -> R:
    """Call a function within `apart`, which is also left if an interrupt keeps `with` from it."""
    around = apart(functions=functions)
    try:
        with around:
            return body(*args)
    except BaseException:
        around.__exit__(None, None, None)
        raise


class _Apart:
    """Suspends modes and hooks; leaving it can be repeated."""

    def __init__(self, functions: list[TorchFunctionMode]) -> None:
        self._functions = functions
        self._modes = [] if is_traced() else _get_current_dispatch_mode_stack()
        hooks = _SAVED._top_saved_tensors_default_hooks(True)
        is_own = hooks is not None and hooks[0] is _same
        self._hooked = hooks is not None and not is_own and _SAVED._saved_tensors_hooks_is_enabled()

    def __enter__(self) -> None:
        try:
            if self._functions:
                set_function_modes(())
            if self._modes:
                _set_dispatch_modes(())
            if self._hooked:
                _SAVED._push_saved_tensors_default_hooks(_same, _same)
        except BaseException:
            surely(self._put_back)
            raise

    def __exit__(self, *error: object) -> None:
        surely(self._put_back)

    def _put_back(self) -> None:
        if self._hooked:
            while (top := _SAVED._top_saved_tensors_default_hooks(True)) and top[0] is _same:
                _SAVED._pop_saved_tensors_default_hooks()
        if self._modes:
            _set_dispatch_modes(self._modes)
        if self._functions:
            set_function_modes(self._functions)


def _set_dispatch_modes(wanted: Sequence[TorchDispatchMode]) -> None:
    """Make these the only active dispatch modes; after an interrupt, it can be called again."""
    modes = _get_current_dispatch_mode_stack()
    alike = 0
    while alike < min(len(modes), len(wanted)) and modes[alike] is wanted[alike]:
        alike += 1
    for _ in modes[alike:]:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in wanted[alike:]:
        torch._C._push_on_torch_dispatch_stack(mode)


def is_seen() -> bool:
    """Return whether a dispatch mode, or hooks on the tensors that autograd saves, are on."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or _SAVED._top_saved_tensors_default_hooks(True) is not None
    )


_SAVED: Any = torch._C._autograd
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def is_traced() -> bool:
    """Return whether a dispatch mode is on that traces or replaces tensors by stand-ins."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING
    )


def _same(tensor: Tensor) -> Tensor:
    """Return its data alone: a node that saved its own output would never be freed."""
    return tensor.detach()


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def surely(action: Callable[..., object], *args: object) -> None:
    """Call a repeatable action; if it raises or is interrupted, call it once more and re-raise."""
    try:
        action(*args)
    except BaseException:
        action(*args)
        raise
