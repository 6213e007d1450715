"""Hooks that run in training only: copies of the model and function transforms skip them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import get_gradient_edge
from torch.fx import Proxy
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import call_all
from adiv_monitor.rerun.replaced import hold, release
from adiv_monitor.rerun.surroundings import is_rerun
from adiv_monitor.rerun.thread import is_traced, run_apart, surely

_PLAIN = (Tensor, nn.Parameter)
HiddenTable = tuple[dict[str, Any], str, object]  # a module's attributes, the name of one, a table


class Hook(partial[Any]):
    """A hook of the monitor on a module, a tensor or an optimizer; calls the partial function.

    When torch copies or pickles parameters and optimizers, it drops their hooks. It keeps those of
    modules, which therefore get a `ModuleHook`. One hook can be on many modules: each object that
    lives for a whole step costs time in Python's garbage collection.
    """

    __torch_unserializable__ = True  # no warning when a parameter is sent to another process


# The tables in which torch keeps hooks by number, each followed by the other tables with the same
# numbers. An entry left in a copy of a module would change how a later hook of that number is
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
    """Remove a hook from a module, tensor or optimizer, even if it was only partly registered.

    The hook is found by its identity in torch's tables, not by its handle, because an exception may
    occur before the handle is known. If this call is interrupted, it can be repeated.

    Args:
        owner: the object with the hook.
        hook: the hook.
        where: the tables that may contain it; none: all tables.
    """
    for names in where or _TABLES:
        hooks = getattr(owner, names[0], None)
        if not hooks:
            continue
        numbers = [number for number, other in hooks.items() if other is hook]
        if not numbers:
            continue
        tables = [getattr(owner, name) for name in names]
        for table in reversed(tables):  # the hook itself last, since a repeated call looks for it
            for number in numbers:
                table.pop(number, None)
        _show(tables)


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


class ModuleHook:
    """A forward hook that is invisible to copies, pickles and `torch.jit.script` of the module.

    Args:
        module: the module.
        hook: called before the forward pass with (module, args, kwargs), or after it with
            (module, args, kwargs, output).
        before: whether it runs before the forward pass, and then before all other hooks.
        always: whether it also runs after a forward pass that raised, with None as the output.
        first: whether it runs before all other hooks after the forward pass.
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
        """Register the hook. `remove` removes it, even if this method raises."""
        module, hook = self._module, self._hook
        if self._before:
            self._handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            self._handle = module.register_forward_hook(
                hook, prepend=self._first, with_kwargs=True, always_call=self._always
            )
        names = _BEFORE_MODULE if self._before else _AFTER_MODULE
        held = module.__dict__
        hooks, *others = [held[name] for name in names]
        for table in (*others, hooks):
            # Torch runs hooks through a table's items. `copy` and `pickle` look at its attributes
            # first, which OrderedDicts take; another hook of the monitor may have set them.
            attributes = table.__dict__
            if "values" not in attributes:
                attributes["__reduce_ex__"] = attributes["values"] = _Others(table, hooks)

    def remove(self) -> None:
        """Remove the hook and restore the module."""
        names = _BEFORE_MODULE if self._before else _AFTER_MODULE
        if self._handle is None:
            take_off(self._module, self._hook, names)
        else:
            self._handle.remove()  # from all tables: other code may have cleared only the hooks
            held = self._module.__dict__
            _show([held[name] for name in names])


def hide_hooks(modules: Iterable[nn.Module], hidden: list[HiddenTable]) -> None:
    """Hide the monitor's hooks on modules from code that asks whether there are any.

    They do not run meanwhile. `show_hooks` shows them again, even if this function raises.

    Args:
        modules: the modules.
        hidden: the list to which what was hidden is added.
    """
    for held in map(vars, modules):
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            table = held[name]
            if Hook in map(type, dict.values(table)):  # the table hides ours
                hidden.append((held, name, table))
                others = ((i, hook) for i, hook in table.items() if type(hook) is not Hook)
                held[name] = OrderedDict(others)


def show_hooks(hidden: Iterable[HiddenTable]) -> None:
    """Show hooks again; after an interrupt, it can be called again."""
    for held, name, table in hidden:
        held[name] = table


class NextForward:
    """Calls a function once, when a forward pass through any of the modules begins or ends.

    Args:
        modules: the modules, any of which may be called first.
        function: called with that module, the arguments of the call and its keyword arguments.
        guard: runs the body of a hook: (body, *arguments).
        counts: asked at the first evaluation whether it counts, for which other weights may be
            swapped in, and back. If not, no later one does.
        ends: whether to wait until the module has run.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        function: Callable[[nn.Module, Any, Any], object],
        guard: Callable[..., object],
        counts: Callable[[], bool],
        *,
        ends: bool = False,
    ) -> None:
        self._function = function
        self._counts = counts
        self._waits = False  # until the next training step
        hook = Hook(guard, self._runs)
        self._hooks = [ModuleHook(module, hook, before=not ends) for module in modules]

    def put_on(self) -> None:
        """Register the hooks. `remove` removes them, even if this method raises."""
        hold(self)
        for hook in self._hooks:
            hook.put_on()

    def remove(self) -> None:
        """Remove the hooks."""
        call_all(*[hook.remove for hook in self._hooks])
        self._hooks.clear()
        release(self)

    def _runs(self, module: nn.Module, args: Any, kwargs: Any, output: object = None) -> None:
        if is_rerun() or not trains(args):
            return
        if not (module.training or torch.is_grad_enabled()):  # an evaluation
            self._waits = self._waits or not self._counts()
            if self._waits:
                return
        surely(self.remove)
        outside = _aside.on
        try:
            _aside.on = True
            # It may watch a rerun with a torch function mode.
            run_apart(self._function, module, args, kwargs, functions=True)
            _aside.on = outside
        finally:
            _aside.on = outside


class _Aside(threading.local):
    """Whether this thread runs the monitor's own code in the middle of a forward pass."""

    on = False


_aside = _Aside()


def is_aside() -> bool:
    """Return whether functions called now do not belong to the surrounding forward pass."""
    return _aside.on and not is_rerun()


class _Others:
    """A module's table of hooks without the monitor's; replaces two methods of the table.

    It hides the monitor's hooks from code that copies, pickles or lists the table.

    Args:
        table: the table.
        hooks: the hooks, by the same numbers.
    """

    __slots__ = ("_hooks", "_table")

    def __init__(self, table: dict[int, Any], hooks: dict[int, Any]) -> None:
        self._table = table
        self._hooks = hooks

    def __call__(self, *protocol: Any) -> Any:
        """Return the other hooks' values or, given a pickle protocol, their reduced form."""
        hooks = self._hooks
        others = OrderedDict(
            (i, entry) for i, entry in self._table.items() if type(hooks.get(i)) is not Hook
        )
        return others.__reduce_ex__(*protocol) if protocol else others.values()


def _show(tables: Sequence[dict[int, Any]]) -> None:
    """Restore the tables' methods if none of the hooks in the first table is the monitor's."""
    hooks = tables[0]
    if hooks and Hook in map(type, dict.values(hooks)):  # the table hides ours
        return
    for table in tables:
        attributes = table.__dict__
        if "__reduce_ex__" in attributes:  # set first and deleted last, so an interrupt loses none
            attributes.pop("values", None)
            del attributes["__reduce_ex__"]


def trains(value: object) -> bool:
    """Return whether a hook's argument belongs to a training step.

    Otherwise a function over the model runs, which the hook must ignore: a transform of
    `torch.func`, a batched gradient, a trace, an export, or a run without data (fake and meta
    tensors).
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or is_traced():
        return False
    return has_data(value)


def has_data(value: object) -> bool:
    """Return whether a value is not a stand-in for a tensor."""
    if not isinstance(value, Tensor):
        return not isinstance(value, Proxy)
    if type(value) not in _PLAIN:
        return torch._C._has_storage(value) and not value.is_meta and not is_fake(value)
    if not torch._C._has_storage(value) or value.is_meta:
        return False
    if torch._is_functional_tensor(value):
        return not is_fake(value)
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def holds_memory(value: Any) -> bool:
    """Return `has_data(value)` in a backward pass that trains, where no transform is running."""
    if type(value) not in _PLAIN:
        return has_data(value)
    return torch._C._has_storage(value) and not value.is_meta
