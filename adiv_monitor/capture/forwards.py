"""Follows the forward calls of a model's modules, and the torch functions that are called in them.

One pair of global hooks sees every forward call in the process and looks the module up. Nothing is
on the model itself, so copies, pickles, scripts and torch's fast paths are as without a monitor.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.runs import Runs
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.trace import Called, Known, Plan
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.rerun.thread import function_modes, is_seen, run_apart, set_function_modes

Function = Callable[..., Any]


@dataclass(eq=False)
class FunctionToCall:
    """A call of a torch function that runs exactly once, even if code around it fails.

    Attributes:
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        error: the exception that it raised.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: BaseException | None = None
    _results: list[Any] = field(default_factory=list)

    def __call__(self, twin: Function | None = None) -> Any:
        """Return the result; the first call runs the function, or an equivalent `twin`."""
        if not self._results:
            try:
                self._results.append((twin or self.function)(*self.args, **self.kwargs))
            except BaseException as error:
                self.error = error
                raise
        return self._results[0]


class _Mode(TorchFunctionMode):
    """Passes every call of a torch function to a watcher, which executes it."""

    def __init__(self, watcher: "Watcher", guard: Guard) -> None:
        super().__init__()
        self._watcher = watcher
        self._guard = guard

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle one call of a torch function."""
        call = FunctionToCall(func, args, kwargs or {})
        if self._guard.broken:
            return call()
        try:
            return self._watcher.called(call)
        except BaseException as error:
            if error is call.error:
                raise
            if not isinstance(error, Exception):  # KeyboardInterrupt and the like must propagate
                self._guard.broken = True
                raise
            self._guard.failed(error)
            return call()


@dataclass(frozen=True, eq=False)
class Forward:
    """A running forward call, with the state at its beginning that may since have changed.

    Attributes:
        module: the module.
        args: the positional arguments.
        random: the state of the random numbers.
        number: increases with every forward call that begins.
        is_open: whether the functions in it are watched.
        called: the calls in it that take trained parameters, without those in nested forwards.
    """

    module: nn.Module
    args: tuple[Any, ...]
    random: Randomness
    number: int
    is_open: bool
    called: list[Called] = field(default_factory=list)


class _Running(threading.local):
    """The forward calls that run in one thread, outermost first, and its mode."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.mode: _Mode | None = None  # while it is on
        self.inside = ""  # the name of the opened function
        self.plain: nn.Module | None = None  # the module whose use is known, and just taken


class Watcher(Protocol):
    """Receives the events of the running forward calls."""

    def called(self, call: FunctionToCall) -> Any:
        """Execute a call of a torch function and return its result."""

    def begins(self, forward: Forward) -> None:
        """Handle the beginning of a module's forward."""

    def plain(
        self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        """Handle the end of a forward whose use of parameters is known."""

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward."""


class Forwards:
    """Global hooks that let a watcher execute the torch functions inside of modules.

    A module whose use of its parameters is known needs one hook behind its forward, and nothing
    else. Where functions are watched, a mode is on in each thread from the beginning of the
    outermost watched forward to its end, so that modes nest as forward calls do and re-entrant
    checkpointing is covered. It is off inside modules that run with gradients disabled (except in
    reruns) or whose parameters are all frozen: some of torch's modules choose another path, with
    other rounding, while a mode is on and nothing requires gradients.

    Args:
        selection: the parameters to measure, in whose modules functions are watched.
        guard: receives failures.
        plan: the modules with known uses, in which functions need not be watched; None: none.
        repeated: whether to watch reruns of forward passes, and nothing else.

    Attributes:
        runs: the runs of these modules, if functions are watched in all of them (without a plan).
    """

    def __init__(
        self,
        selection: Selection,
        guard: Guard,
        plan: Plan | None = None,
        *,
        repeated: bool = False,
    ) -> None:
        self.runs = Runs()
        self._guard = guard
        self._repeated = repeated
        self._devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        self._running = _Running()
        self._active = True
        self._numbers = count(1)
        self._is_survey = plan is None and not repeated
        # Modules by their ids: other modules of the process need not be hashable.
        self._known = {} if plan is None else plan.known
        self._open = set(map(id, selection.modules if plan is None else plan.watched))
        self._watcher: Watcher
        self._watching = GlobalHooks(self._before, self._after)
        self._plain = GlobalHooks(None, self._after_known)
        self._inside: set[int | None] = set()  # threads in which forward calls run

    def watch(self, watcher: Watcher) -> None:
        """Register the hooks for this watcher; call `remove` afterwards, even if this raises."""
        self._watcher = watcher
        if self._open:
            self._watching.put_on()
        if self._known:
            self._plain.put_on()

    def remove(self) -> None:
        """Remove the hooks and this thread's mode.

        If forward calls run in other threads, the last one to end removes the hooks, because the
        hooks remove their thread's mode.
        """
        self._active = False
        call_all(self._unwind, self._plain.remove, self._take_off)

    def _take_off(self) -> None:
        if self._inside.isdisjoint(thread.ident for thread in threading.enumerate()):
            self._watching.remove()
            vars(self).pop("_watcher", None)  # a cycle would keep gradients until it is collected

    # --- what runs -------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether functions are watched in any module."""
        return bool(self._open)

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs, or the module whose known use is taken."""
        plain = self._running.plain
        return self.forward.module if plain is None else plain

    @property
    def forward(self) -> Forward:
        """The innermost forward call."""
        return self._running.forwards[-1]

    @property
    def running(self) -> Sequence[Forward]:
        """All running forward calls, outermost first."""
        return self._running.forwards

    @property
    def inside(self) -> str:
        """The name of the opened function that runs; "" if there is none."""
        return self._running.inside

    def opened(self, call: FunctionToCall) -> Any:
        """Call a Python function of torch with the calls inside it watched."""
        mode = self._running.mode
        assert mode is not None
        twin = without_overrides(call.function)
        outside, self._running.inside = self._running.inside, call.function.__name__
        try:
            with mode:
                return call(twin)
        finally:
            self._running.inside = outside

    # --- hooks -----------------------------------------------------------------------------------

    def _after_known(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Let the watcher take the use of a module whose use is known."""
        known = self._known.get(id(module))
        if known is None or not self._active or self._guard.broken:
            return
        if not (isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled()):
            return
        if reruns() or not trains(output):
            return
        self._running.plain = module
        try:
            torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                if is_seen():
                    run_apart(self._watcher.plain, known, args, kwargs, output)
                else:
                    self._watcher.plain(known, args, kwargs, output)
        except Exception as error:
            self._guard.failed(error)
        except BaseException:
            self._guard.broken = True
            raise
        finally:
            torch._C._set_grad_enabled(True)
            self._running.plain = None

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._running.forwards or (id(module) in self._open and self._counts):
            self._guarded(self._enter, module, args)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        """Handle the end of a forward; without keyword arguments if it raised."""
        # The mode is still on if the stack had no room to take it off.
        if id(module) in self._open or self._running.forwards or self._running.mode is not None:
            self._guarded(self._leave, module, args, *(more if more[1:] else ({}, None)))

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook, and track the running forward calls even after failures."""
        if reruns() != self._repeated:  # a rerun within one is not watched either
            return
        try:
            with torch._C.DisableTorchFunction():
                run_apart(body, *args)
        except BaseException as error:
            self._unwind()
            if not isinstance(error, Exception):
                self._guard.broken = True
                raise
            self._guard.failed(error)

    @property
    def _counts(self) -> bool:
        """Whether forward calls that begin now can be part of what is watched."""
        return self._repeated or torch.is_grad_enabled()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        forwards = self._running.forwards
        if forwards and forwards[0].module is module:  # an interrupt has ended its forward
            self._unwind()
        if not forwards:
            if not (self._active and trains(args)):
                return
            self._inside.add(threading.get_ident())
        elif not forwards[-1].is_open:
            return
        is_open = self._counts and id(module) in self._open
        if not (is_open or id(module) in self._known or self._is_closed(module)):
            return  # a part of the forward around it
        random = Randomness(self._devices)
        forward = Forward(module, args, random, next(self._numbers), is_open)
        forwards.append(forward)
        self._switch()
        if is_open and self._active and not self._guard.broken:
            self._watcher.begins(forward)

    def _is_closed(self, module: nn.Module) -> bool:
        """Return whether no trained parameter can be used in a module."""
        trains = {p.requires_grad for p in nn.Module.parameters(module)}
        return not self._counts or trains == {False}

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        forwards = self._running.forwards
        if output is None and any(forward.module is module for forward in forwards):
            while forwards[-1].module is not module:
                forwards.pop()  # it raised, and the stack had no room for its own hook
        forward = forwards[-1] if forwards and forwards[-1].module is module else None
        try:
            if output is not None and self._is_survey and id(module) in self._open:
                if forward is None or not torch.is_grad_enabled():
                    self.runs.ran_without_gradients(module, next(self._numbers))
                else:
                    begun, given = forwards[0], (*args, *kwargs.values())
                    self.runs.ran(module, forward.number, given, begun.number, begun.args)
            watches = output is not None and self._active and not self._guard.broken
            if forward is not None and forward.is_open and watches:
                self._watcher.ends(module, args, kwargs, output)
        finally:
            if forward is not None:
                forwards.pop()
            self._switch()
            if forward is not None and not forwards:
                self._inside.discard(threading.get_ident())
                if not self._active:
                    self._take_off()

    def _switch(self) -> None:
        """Turn the mode on if functions of the innermost forward call are watched, else off."""
        running = self._running
        is_on = bool(running.forwards) and running.forwards[-1].is_open
        if is_on is (running.mode is not None):
            return
        modes = function_modes()
        others = [mode for mode in modes if mode is not running.mode]
        if running.forwards and running.mode is not None and len(others) == len(modes):
            return  # it handles a call, as for modules made by `torch.cond`: torch puts it back
        if is_on:
            running.mode = _Mode(self._watcher, self._guard)
            set_function_modes([*others, running.mode])
        else:
            set_function_modes(others)
            running.mode = None  # afterwards: if it raises, the mode is still known

    def _unwind(self) -> None:
        """Forget the forward calls of this thread and remove its mode."""
        self._inside.discard(threading.get_ident())
        self._running.forwards.clear()
        self._running.inside = ""
        self._switch()


@cache
def without_overrides(function: FunctionType) -> Function:
    """Return a copy of a Python function of torch that no function mode intercepts as a whole."""
    never = {name: _never for name in function.__globals__ if name.startswith("has_torch_function")}
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _never(*_: object) -> bool:
    return False
