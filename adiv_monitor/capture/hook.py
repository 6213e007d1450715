"""Hooks that run in training only: copies of the model and function transforms skip them."""

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import get_gradient_edge
from torch.fx import Proxy
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import call_all
from adiv_monitor.rerun.thread import is_traced

_PLAIN = (Tensor, nn.Parameter)

# Global hooks also see the wrapper of a compiled module, as they are meant to. Set once: each new
# filter makes Python repeat the warnings that it has shown.
warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")


class Hook(partial[Any]):
    """A hook of the monitor on a module, a tensor or an optimizer; calls the partial function.

    When torch copies or pickles parameters and optimizers, it drops their hooks; in copies and
    pickles of modules, a hook does nothing. One hook can be on many modules: each object that lives
    for a whole step costs time in Python's garbage collection.
    """

    __torch_unserializable__ = True  # no warning when a parameter is sent to another process

    def __reduce__(self) -> Any:
        """Return what stands for it in a copy or a pickle of its module, of Python's own."""
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and does nothing


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call a hook with a tensor's gradient, after other hooks on the tensor, which may change it.

    Args:
        tensor: the tensor.
        hook: the hook, which must not hold the tensor: the graph holds the hook.
    """
    node: Any = tensor.grad_fn or get_gradient_edge(tensor).node
    number = tensor.output_nr
    handle: RemovableHandle = node.register_prehook(lambda gradients: hook(gradients[number]))
    return handle


class GlobalHooks:
    """Forward hooks on all modules of the process, until this object is removed or collected.

    Args:
        before: method called with (module, args) before each forward; None: nothing is.
        after: method called with (module, args, kwargs, output) after it; if there is a method
            before it, also with (module, args, None) if it raised.
    """

    def __init__(self, before: Callable[..., None] | None, after: Callable[..., None]) -> None:
        # Weakly: in a reference cycle this object would wait for Python's garbage collector.
        self._before = None if before is None else weakly(before)
        self._after = weakly(after)
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove, self._handles).atexit = False

    def put_on(self) -> None:
        """Register the hooks; call `remove` afterwards, even if this raises."""
        if self._before is not None:
            self._handles.append(register_module_forward_pre_hook(self._before))
        always = self._before is not None
        after = register_module_forward_hook(self._after, with_kwargs=True, always_call=always)
        self._handles.append(after)

    def remove(self) -> None:
        """Remove the hooks."""
        remove(self._handles)


def weakly(method: Any) -> Callable[..., None]:
    """Return a hook that keeps no object alive, and that compiled code passes over."""
    reference, function = weakref.ref(method.__self__), method.__func__

    def hook(*args: Any) -> None:
        if not torch.compiler.is_compiling() and (bound := reference()) is not None:
            function(bound, *args)

    return hook


def remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks, whatever fails; it can be called again."""
    call_all(*[handle.remove for handle in handles])
    for handle in handles:
        _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch leaves it


def is_captured() -> bool:
    """Return whether a CUDA graph is captured here, which takes no copies to or from the host."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_used and torch.cuda.is_current_stream_capturing())


def trains(value: object) -> bool:
    """Return whether a hook's argument belongs to a training step.

    Otherwise a function over the model runs, which the hook must ignore: a transform of
    `torch.func`, a batched gradient, a trace, an export, the capture of a CUDA graph, or a run
    without data (fake and meta tensors). All hooks pass over compiled code.
    """
    if torch._C._is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if is_captured():
        return False
    return not is_traced() and has_data(value)


def has_data(value: Any) -> bool:
    """Return whether a value is not a stand-in for a tensor."""
    if not isinstance(value, Tensor):
        return not isinstance(value, Proxy)
    is_real = type(value) in _PLAIN or not is_fake(value)
    return is_real and torch._C._has_storage(value) and not value.is_meta
