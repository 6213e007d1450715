"""Thread-local settings of torch: modes and hooks of the training, saved and restored."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import _disable_current_modes


def function_modes() -> list[TorchFunctionMode]:
    """Return the torch function modes that are active in this thread, the outermost first."""
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def set_function_modes(wanted: Sequence[TorchFunctionMode]) -> None:
    """Make these the only active modes; none is left or entered."""
    for _ in function_modes():
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in wanted:
        _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def apart(*, functions: bool) -> Iterator[None]:
    """Keep what the monitor computes apart: the training's modes do not see it.

    Dispatch modes are suspended, unless one of them traces; so are hooks on the tensors that
    autograd saves. Otherwise selective checkpointing would cache what the monitor computes, and a
    mode that draws random numbers would draw more of them.

    Args:
        functions: also suspend function modes and autocast.
    """
    outside = function_modes() if functions else []
    with ExitStack() as stack:
        if functions:
            stack.enter_context(torch._C._DisableAutocast())
        if outside:
            stack.callback(set_function_modes, outside)
            set_function_modes(())
        if torch._C._len_torch_dispatch_stack() and not is_traced():
            stack.enter_context(_disable_current_modes())
        hooks = _SAVED._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] is not _same and _SAVED._saved_tensors_hooks_is_enabled():
            stack.enter_context(saved_tensors_hooks(_same, _same))
        yield


def is_seen() -> bool:
    """Return whether a dispatch mode, or hooks on the tensors that autograd saves, are on."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or _SAVED._top_saved_tensors_default_hooks(True) is not None
    )


_SAVED: Any = torch._C._autograd


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
