"""Sees every function that is called inside the forwards of a model's modules."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import Hook, ModuleHook, is_aside, trains
from adiv_monitor.capture.room import FRAMES, Room
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.trace import Called, Known, Plan
from adiv_monitor.capture.weights.shards import gives_back
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import is_rerun
from adiv_monitor.rerun.thread import ThreadState, function_modes, set_function_modes, surely

Function = Callable[..., Any]


class FunctionToCall:
    """A torch function that is called once, whatever goes wrong around it.

    Attributes:
        function: the function.
        args: what it gets.
        kwargs: see args.
        error: what it raised.
    """

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.error: BaseException | None = None
        self._results: list[Any] = []

    def __call__(self, twin: Function | None = None) -> Any:
        """What it gives; it, or a twin that gives the same, is called the first time."""
        if not self._results:
            try:
                self._results.append((twin or self.function)(*self.args, **self.kwargs))
            except BaseException as error:
                self.error = error
                raise
        return self._results[0]


class _Mode(TorchFunctionMode):
    """Hands every call of a torch function to a watcher, which makes it."""

    def __init__(self, watcher: "Watcher", guard: Guard) -> None:
        super().__init__()
        self._watcher = watcher
        self._guard = guard

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A call."""
        call = FunctionToCall(func, args, kwargs or {})
        if self._guard.broken:
            return call()
        state = ThreadState()
        try:
            return call() if is_aside() else self._watcher.called(call)
        except BaseException as error:
            if error is call.error:
                raise
            gradients = torch.is_grad_enabled()
            state.put_back()
            if func is torch._C._set_grad_enabled and (gradients or isinstance(error, Exception)):
                torch._C._set_grad_enabled(gradients)  # no `with` of the user's was begun in vain
            if not isinstance(error, Exception):  # the keyboard's, which is not ours to keep
                self._guard.broken = True
                raise
            self._guard.failed(error)
            return call()


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward that runs, and what it found when it began, as far as that is gone since.

    Attributes:
        module: whose it is.
        args: what it got.
        kwargs: see args.
        random: the random numbers.
        written: by id, what tensors were that were written to since.
        number: of the forwards that began, the last one has the highest.
        called: the calls in it that take trained parameters, but for those in forwards inside.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Randomness
    written: dict[int, Tensor]
    number: int
    called: list[Called] = field(default_factory=list)


class _Running(threading.local):
    """The forwards that run in a thread, the outermost first, and the mode that is on around."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.mode: _Mode | None = None
        self.inside = ""  # which function was opened
        # In which module no function is looked at, and what was taken off for that, if it could be.
        self.closed: tuple[nn.Module, _Mode | None] | None = None
        self.plain: nn.Module | None = None  # what a plain hook is on that runs


class Watcher(Protocol):
    """What is told of the forwards that run."""

    def called(self, call: FunctionToCall) -> Any:
        """Make a call of a torch function, and give what it gives."""
        ...

    def begins(self, forward: Forward) -> None:
        """A module's forward begins."""
        ...

    def plain(
        self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A forward has run whose use of parameters is known."""
        ...

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A module's forward ends; `output` is None if it raised."""
        ...


class Forwards:
    """Hooks on modules that let a watcher make all calls of torch functions inside them.

    The mode is on from the beginning of the outermost module's forward to its end, in each thread,
    so that it nests as forwards do, and re-entrant checkpointing is seen too. It is off where no
    gradients are recorded (but for repetitions), and inside modules that are not trained: some of
    torch's modules choose another way, with other roundings, while a mode is on and nothing asks
    for gradients.

    Args:
        modules: the modules that hold what is trained, be it further below.
        closed: modules among or below them that hold parameters, none of which is trained.
        devices: on which forwards may draw random numbers.
        guard: is told of what fails.
        renew: called before a forward pass is followed; what it gives follows in place of this.
        plan: where uses are known, so that plain hooks do; None: nowhere.
        levels: how deep the modules are inside each other.
        repeated: watch repetitions of forward passes, and nothing but these.

    Attributes:
        strangers: a module ran in the place of one of these: its copy, with its hooks.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        closed: Collection[nn.Module],
        devices: Collection[torch.device],
        guard: Guard,
        renew: Callable[[], "Forwards | None"] = lambda: None,
        plan: Plan | None = None,
        *,
        levels: int = 1,
        repeated: bool = False,
    ) -> None:
        self.strangers = False
        self._renew = renew
        self._guard = guard
        self._repeated = repeated
        self._modules = modules
        self._closed = closed
        self._plan = plan
        self._running = _Running()
        self._devices = devices
        self._active = True
        self._numbers = count()
        self._room = Room()
        self._levels = levels
        self._watcher: Watcher
        self._hooks: list[ModuleHook] = []
        self._inside: set[int | None] = set()  # threads in which forwards run

    @classmethod
    def of(
        cls,
        selection: Selection,
        guard: Guard,
        renew: Callable[[], "Forwards | None"] = lambda: None,
        plan: Plan | None = None,
        *,
        repeated: bool = False,
    ) -> "Forwards":
        """Those of the modules that hold what is to be measured."""
        devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        levels = 2 + max((path.count(".") for path in selection.modules.values()), default=0)
        return cls(
            *(selection.modules, selection.closed, devices, guard, renew, plan),
            levels=levels,
            repeated=repeated,
        )

    def watch(self, watcher: Watcher) -> None:
        """Put the hooks on, for this watcher; whatever comes of that, `remove` takes them off."""
        self._watcher = watcher
        plan = self._plan
        watched, plain = (self._modules, ()) if plan is None else (plan.watched, plan.known)
        if plan is not None:
            begin = Hook(self._guarded, self._begin)
            outermost = [m for m in plan.outermost if m not in plan.watched]
            self._hooks += [ModuleHook(m, begin, before=True) for m in outermost]
            take = Hook(self._guarded, self._take)
            # While the output is what the function gave.
            self._hooks += [ModuleHook(m, take, before=False, first=True) for m in plain]
        for modules, enter, leave in (
            (watched, self._enter, self._leave),
            ([*self._closed, *plain] if watched else (), self._close, self._reopen),
        ):
            before, after = Hook(self._guarded, enter), Hook(self._guarded, leave)
            for module in modules:
                self._hooks.append(ModuleHook(module, before, before=True))
                first = gives_back(module)  # while its parameters are there
                self._hooks.append(
                    ModuleHook(module, after, before=False, always=True, first=first)
                )
        self._room.make(self._levels + FRAMES)
        for hook in self._hooks:
            hook.put_on()

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs, or has just run where a plain hook is on it."""
        plain = self._running.plain
        return self.forward.module if plain is None else plain

    @property
    def is_closed(self) -> bool:
        """Whether a module runs whose functions are not to be looked at."""
        return self._running.closed is not None

    @property
    def number(self) -> int:
        """Of its forward; of none that is watched, the first number."""
        forwards = self._running.forwards
        return forwards[-1].number if forwards else 0

    @property
    def forward(self) -> Forward:
        """Its forward."""
        return self._running.forwards[-1]

    @property
    def running(self) -> Sequence[Forward]:
        """All forwards that run, the outermost first."""
        return self._running.forwards

    @property
    def is_outermost(self) -> bool:
        """Whether no other module's forward runs around it."""
        return len(self._running.forwards) == 1

    @property
    def around(self) -> list[nn.Module]:
        """The modules whose forwards the innermost one runs in, outermost first."""
        return [forward.module for forward in self._running.forwards[:-1]]

    @property
    def inside(self) -> str:
        """The opened function that runs; "" if none."""
        return self._running.inside

    def opened(self, call: FunctionToCall) -> Any:
        """What a Python function of torch's gives, with the calls inside it watched as well."""
        mode = self._running.mode
        assert mode is not None
        twin = without_overrides(call.function)
        outside, self._running.inside = self._running.inside, call.function.__name__
        try:
            with mode:
                return call(twin)
        finally:
            self._running.inside = outside

    def is_written(self, tensor: Tensor) -> None:
        """A tensor is about to be written to: the forwards that run have found it as it is now."""
        copy = tensor.detach().clone()
        for forward in self._running.forwards:
            forward.written.setdefault(id(tensor), copy)

    def remove(self) -> None:
        """Take the hooks off, and the mode of this thread.

        Where forwards run in other threads, the last of them to end takes the hooks off: by those
        it takes off the mode of its thread.
        """
        self._active = False
        call_all(self._unwind, self._take_off, self._room.leave)

    def _take_off(self) -> None:
        if self._inside.isdisjoint(thread.ident for thread in threading.enumerate()):
            call_all(*(hook.remove for hook in self._hooks))
            self._hooks.clear()

    @property
    def _is_watching(self) -> bool:
        return self._active and not self._guard.broken

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        """The body of a hook; the forwards that run are followed even if nothing else works."""
        if torch.compiler.is_compiling():
            return
        try:
            with ThreadState():
                body(*args)
        except BaseException as error:
            self._unwind()
            if not isinstance(error, Exception):
                self._guard.broken = True
                raise
            self._guard.failed(error)

    def _unwind(self) -> None:
        """No forward runs in this thread, or none is to be followed any more."""
        running = self._running
        running.forwards.clear()
        self._inside.discard(threading.get_ident())
        running.closed, running.inside = None, ""
        mode, modes = running.mode, function_modes()
        if mode not in modes:  # it makes a call just now, and is put back after that
            return
        surely(set_function_modes, [other for other in modes if other is not mode])
        running.mode = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        if module not in self._modules:
            self.strangers = True
            return
        if running.forwards and _is_over(running.forwards, module):
            self._unwind()
        begins = not running.forwards
        if begins and (not self._may_begin(args) or self._hands_over(module, args, kwargs)):
            return
        forward = Forward(
            *(module, args, kwargs, Randomness(self._devices), {}), number=next(self._numbers)
        )
        if begins:
            if running.mode is not None:  # of a forward pass that was interrupted
                self._unwind()
            self._inside.add(threading.get_ident())
            running.mode = _Mode(self._watcher, self._guard)
            running.mode.__enter__()  # type: ignore[no-untyped-call]
        running.forwards.append(forward)
        if len(running.forwards) > self._levels:  # a module calls itself
            self._levels *= 2
            self._room.make(self._levels + FRAMES)
        if self._is_watching:
            with torch._C.DisableTorchFunction():
                self._watcher.begins(forward)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plain hooks are on modules inside: no function is watched here."""
        if not (is_rerun() or self._running.forwards) and self._may_begin(args):
            self._hands_over(module, args, kwargs)

    def _take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_rerun() or not (self._is_watching and torch.is_grad_enabled()):
            return
        known = None if self._plan is None else self._plan.known.get(module)
        if known is None:
            self.strangers = True
            return
        running = self._running
        running.plain = module
        try:
            with torch._C.DisableTorchFunction():
                self._watcher.plain(known, args, kwargs, output)
        finally:
            running.plain = None

    def _may_begin(self, args: tuple[Any, ...]) -> bool:
        return self._active and (self._repeated or torch.is_grad_enabled()) and trains(args)

    def _hands_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Let a successor follow the forward pass that begins, if this one is not to; is it so?"""
        successor = self._renew()
        if successor is None:
            return not self._active
        # Torch has listed the hooks of this call before the successor put its own on.
        if module in successor._modules:
            successor._guarded(successor._enter, module, args, kwargs)
        return True

    def _close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        begins = not running.forwards and self._may_begin(args)
        if begins and self._hands_over(module, args, kwargs):
            return
        if running.mode is None or running.closed is not None:
            return
        if _get_current_function_mode() is running.mode:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
            running.closed, running.mode = (module, running.mode), None
        else:  # another mode is on within, which must stay so
            running.closed = module, None

    def _reopen(self, module: nn.Module, *others: object) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        if running.closed is not None and running.closed[0] is module:
            _, mode = running.closed
            running.closed = None
            if mode is not None:
                running.mode = mode
                _push_mode(mode)  # type: ignore[no-untyped-call]

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        if not running.forwards or module is not running.forwards[-1].module:
            return
        try:
            if self._is_watching:
                with torch._C.DisableTorchFunction():
                    self._watcher.ends(module, args, kwargs, output)
        finally:
            running.forwards.pop()
            if not running.forwards and running.mode is not None:
                running.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                running.mode = None
                self._inside.discard(threading.get_ident())
                if not self._active:
                    self._take_off()


@contextmanager
def unwatched() -> Iterator[None]:
    """The functions called within are no part of a forward pass: what watches one is off."""
    modes = function_modes()
    try:
        while isinstance(_get_current_function_mode(), _Mode):  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
        yield
    finally:
        surely(set_function_modes, modes)


def _is_over(forwards: Sequence[Forward], module: nn.Module) -> bool:
    """Whether a forward of this module, among those that seem to run, was left by an interrupt.

    Torch calls no hooks then. Read from the call stack, where the new one is already.
    """
    seeming = sum(forward.module is module for forward in forwards)
    if not seeming:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            seeming -= 1
        frame = frame.f_back
    return seeming >= 0


_CALL = nn.Module._call_impl.__code__


@cache
def without_overrides(function: FunctionType) -> Function:
    """A twin of a Python function of torch's that doesn't hand itself to a mode as a whole."""
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
