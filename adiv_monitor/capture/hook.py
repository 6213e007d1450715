"""Hooks that only the training run sees: not its copies, and no function over the model."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx import Proxy
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import call_all
from adiv_monitor.rerun.surroundings import is_rerun
from adiv_monitor.rerun.thread import surely

_PLAIN = (Tensor, nn.Parameter)
_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


class Hook(partial[Any]):
    """A hook of ours, on a module, a tensor or an optimizer: calls what it was made of.

    Torch drops those on parameters and optimizers when it copies or pickles them; modules keep
    theirs, so on them goes a `ModuleHook`. One can be on many modules: every object that lives for
    a step is paid for again when Python collects garbage.
    """

    __torch_unserializable__ = True  # a parameter sent to another process goes without a warning


# Where torch keeps hooks by their numbers, and after each what else it keeps by the same numbers.
# Left in a copy of a module, an entry of those would change how a later hook of that number is
# called.
_BEFORE_MODULE = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
_AFTER_MODULE = "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
ON_GRADIENT = ("_backward_hooks",)
ON_ACCUMULATION = ("_post_accumulate_grad_hooks",)
_TABLES = (
    *(_BEFORE_MODULE, _AFTER_MODULE, ON_GRADIENT, ON_ACCUMULATION),
    *(("_optimizer_step_pre_hooks",), ("_optimizer_step_post_hooks",)),
    *(("_global_optimizer_pre_hooks",), ("_global_optimizer_post_hooks",)),  # of all optimizers
)


def take_off(owner: object, hook: object, *where: Sequence[str]) -> None:
    """Take a hook off a module, tensor or optimizer, be it on it or not, or only half.

    It is found by itself, where torch keeps it, not by what putting it on gave: an exception may
    come before that is known. If this is interrupted, it can be done again.

    Args:
        owner: what it is on.
        hook: the hook.
        where: the tables in which it may be; none: any.
    """
    for names in where or _TABLES:
        hooks = getattr(owner, names[0], None)
        if not hooks:
            continue
        numbers = [number for number, other in hooks.items() if other is hook]
        if not numbers:
            continue
        tables = [getattr(owner, name) for name in names]
        for table in reversed(tables):  # the hook itself last: by it all is found
            for number in numbers:
                table.pop(number, None)
        _show(tables)


class TensorHook:
    """A hook on a tensor; neither is held.

    Args:
        tensor: what it is to be put on.
        hook: called with its gradient.
    """

    __slots__ = ("_handle", "_hook", "_tensor")

    def __init__(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        self._tensor = weakref.ref(tensor)
        self._hook = weakref.ref(hook)
        self._handle: RemovableHandle | None = None

    def put_on(self) -> None:
        """Put it on; whatever comes of that, `remove` takes it off."""
        tensor = self._tensor()
        if tensor is not None:
            self._handle = tensor.register_hook(self._hook())  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take it off."""
        if self._handle is not None:  # the graph keeps hooks of a tensor that is gone
            self._handle.remove()
        else:
            take_off(self._tensor(), self._hook(), ON_GRADIENT)


class ModuleHook:
    """A forward hook that copies, pickles and `torch.jit.script` of the module don't see.

    Args:
        module: what it is to be put on.
        hook: called before the forward pass with (module, args, kwargs), or after it with
            (module, args, kwargs, output).
        before: which of the two; before all other hooks then.
        always: after a forward pass that raised too, with None as its output.
        first: after the forward pass, but before all other hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        hook: Hook,
        *,
        before: bool,
        always: bool = False,
        first: bool = False,
    ) -> None:
        self._module = module
        self._hook = hook
        self._before = before
        self._always = always
        self._first = first
        self._handle: RemovableHandle | None = None

    def put_on(self) -> None:
        """Put it on; whatever comes of that, `remove` takes it off."""
        module, hook = self._module, self._hook
        if self._before:
            self._handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            self._handle = module.register_forward_hook(
                hook, prepend=self._first, with_kwargs=True, always_call=self._always
            )
        names = _BEFORE_MODULE if self._before else _AFTER_MODULE
        hooks, *others = [getattr(module, name) for name in names]
        for table in (*others, hooks):
            _hide(table, hooks)

    def remove(self) -> None:
        """Take it off; the module is then as it was."""
        names = _BEFORE_MODULE if self._before else _AFTER_MODULE
        if self._handle is None:
            take_off(self._module, self._hook, names)
        else:
            self._handle.remove()  # from all tables: somebody may have cleared the hooks alone
            _show([getattr(self._module, name) for name in names])


class NextForward:
    """Calls a function once, when a forward pass through any of the modules begins or ends.

    Args:
        modules: any of which may be called first.
        function: what is then called.
        guard: runs the body of a hook: (body, *arguments).
        with_gradients: wait for a pass that records gradients; an evaluation is none.
        ends: wait until the module has run.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        function: Callable[[], object],
        guard: Callable[..., object],
        *,
        with_gradients: bool = False,
        ends: bool = False,
    ) -> None:
        self._function = function
        self._with_gradients = with_gradients
        hook = Hook(guard, self._runs)
        self._hooks = [ModuleHook(module, hook, before=not ends) for module in modules]

    def put_on(self) -> None:
        """Wait from now on; whatever comes of that, `remove` takes the hooks off."""
        for hook in self._hooks:
            hook.put_on()

    def remove(self) -> None:
        """Wait no longer."""
        call_all(*(hook.remove for hook in self._hooks))

    def _runs(self, module: nn.Module, args: object, *others: object) -> None:
        if is_rerun() or not trains(args):
            return
        if torch.is_grad_enabled() or not self._with_gradients:
            surely(self.remove)
            outside = _aside.on
            try:
                _aside.on = True
                self._function()  # which may watch a repetition, by a mode of torch functions
                _aside.on = outside
            finally:
                _aside.on = outside


class _Aside(threading.local):
    """Whether this thread does something of ours in the middle of a forward pass."""

    on = False


_aside = _Aside()


def is_aside() -> bool:
    """Whether what is called now is no part of the forward pass around it."""
    return _aside.on and not is_rerun()


class _Others:
    """A module's table of hooks without ours: stands in the table for two of its methods.

    Args:
        table: the table.
        hooks: by the same numbers, the hooks themselves.
    """

    __slots__ = ("_hooks", "_table")

    def __init__(self, table: dict[int, Any], hooks: dict[int, Any]) -> None:
        self._table = table
        self._hooks = hooks

    def __call__(self, *protocol: Any) -> Any:
        """The others: their values; given a protocol, how they are copied and pickled."""
        hooks = self._hooks
        others = OrderedDict(
            (i, entry) for i, entry in self._table.items() if type(hooks.get(i)) is not Hook
        )
        return others.__reduce_ex__(*protocol) if protocol else others.values()


def _show(tables: Sequence[dict[int, Any]]) -> None:
    """Let tables be as they were, if none of ours is among the hooks, which the first one holds."""
    hooks = tables[0]
    if hooks and Hook in map(type, dict.values(hooks)):  # dict's own: ours hide in the table's
        return
    for table in tables:
        if attributes := table.__dict__:
            attributes.pop("__reduce_ex__", None)
            attributes.pop("values", None)


def _hide(table: dict[int, Any], hooks: dict[int, Any]) -> None:
    """Let those who copy, pickle or list a module's table of hooks find it without ours.

    Torch itself, when it runs hooks, goes through the table's items.
    """
    # An OrderedDict, which the tables are, takes attributes; `copy` and `pickle` look there first.
    attributes = vars(table)
    if "values" not in attributes:  # there may be others of ours
        attributes["__reduce_ex__"] = attributes["values"] = _Others(table, hooks)


def trains(value: object) -> bool:
    """Whether what a hook is given belongs to a training step.

    If not, it is a function over the model that runs, which the hook has to look past: a transform
    of `torch.func` or a batched gradient, a trace, an export, or a run without data (fake and meta
    tensors).
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or _is_traced():
        return False
    return has_data(value)


def has_data(value: object) -> bool:
    """Whether a value is no stand-in for a tensor."""
    if not isinstance(value, Tensor):
        return not isinstance(value, Proxy)
    if type(value) not in _PLAIN:
        return torch._C._has_storage(value) and not value.is_meta and not is_fake(value)
    if not torch._C._has_storage(value) or value.is_meta:
        return False
    if torch._is_functional_tensor(value):
        return not is_fake(value)
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_traced() -> bool:
    """Whether a mode is on under which tensors are stand-ins, or what is done is written down."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING
    )
