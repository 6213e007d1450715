"""Intercepts every torch function that is called inside the forward calls of a model's modules."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import count
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import (
    HiddenTable,
    Hook,
    ModuleHook,
    hide_hooks,
    is_aside,
    show_hooks,
    trains,
)
from adiv_monitor.capture.room import FRAMES, Room
from adiv_monitor.capture.runs import Runs
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.trace import Called, Known, Plan
from adiv_monitor.capture.weights.shards import gives_back
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.replaced import replace_meanwhile
from adiv_monitor.rerun.surroundings import is_rerun
from adiv_monitor.rerun.thread import (
    ThreadState,
    function_modes,
    is_seen,
    run_apart,
    set_function_modes,
    surely,
)

Function = Callable[..., Any]


class FunctionToCall:
    """A call of a torch function that runs exactly once, even if code around it fails.

    Attributes:
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        error: the exception that it raised.
    """

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.error: BaseException | None = None
        self._results: list[Any] = []

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
        self.ended = False
        self._watcher = watcher
        self._guard = guard

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle one call of a torch function."""
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
                torch._C._set_grad_enabled(gradients)  # the user's `with` relies on it
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
        args: the arguments.
        kwargs: the keyword arguments.
        random: the state of the random numbers.
        written: the earlier values, by id, of tensors that were written to since.
        number: increases with every forward call that begins.
        called: the calls in it that take trained parameters, without those in nested forwards.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Randomness
    written: dict[int, Tensor]
    number: int
    called: list[Called] = field(default_factory=list)


class _Running(threading.local):
    """The forward calls that run in one thread, outermost first, and the active mode."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.mode: _Mode | None = None
        self.inside = ""  # the name of the opened function
        # The module in which functions are not watched, and the mode if it could be removed.
        self.closed: tuple[nn.Module, _Mode | None] | None = None
        self.again = 0  # running calls of this module inside itself
        self.plain: nn.Module | None = None  # the module whose plain hook is running


class Watcher:
    """Receives the events of the running forward calls; by default it only executes calls."""

    def called(self, call: FunctionToCall) -> Any:
        """Execute a call of a torch function and return its result."""
        return call()

    def begins(self, forward: Forward) -> None:
        """Handle the beginning of a module's forward."""

    def plain(
        self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a forward whose use of parameters is known."""

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward. `output` is None if the forward raised."""


class Forwards:
    """Hooks on modules that let a watcher execute all calls of torch functions inside them.

    In each thread, the mode is on from the beginning of the outermost module's forward to its end,
    so that modes nest as forward calls do and re-entrant checkpointing is covered. It is off where
    gradients are disabled (except in reruns) and inside modules without trained parameters: some of
    torch's modules choose another path, with other rounding, while a mode is on and nothing
    requires gradients.

    Args:
        modules: path by module, for the modules that hold trained parameters at any depth.
        guard: receives failures.
        renew: called before a forward pass is followed; the `Forwards` that it returns replaces
            this one.
        plan: the modules with known uses, for which plain hooks suffice; None: there are none.
        closed: modules among or below them that hold parameters, none of which is trained.
        devices: the devices on which forward calls may draw random numbers.
        repeated: whether to watch reruns of forward passes, and nothing else.

    Attributes:
        runs: the runs of these modules, if all of them have hooks (without a plan).
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        guard: Guard,
        renew: Callable[[], "Forwards | None"] = lambda: None,
        plan: Plan | None = None,
        *,
        closed: Collection[nn.Module] = (),
        devices: Collection[torch.device] = (),
        repeated: bool = False,
    ) -> None:
        self.runs = Runs()
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
        # The nesting depth of the modules.
        self._levels = 2 + max((path.count(".") for path in modules.values()), default=0)
        self._watcher: Watcher
        self._hooks: list[ModuleHook] = []
        self._inside: set[int | None] = set()  # threads in which forward calls run

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
        """Return the hooks for the modules that hold the parameters of a selection."""
        devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        return cls(
            selection.modules,
            guard,
            renew,
            plan,
            closed=selection.closed,
            devices=devices,
            repeated=repeated,
        )

    def watch(self, watcher: Watcher) -> None:
        """Put on the hooks for this watcher. `remove` removes them, even if this method raises."""
        self._watcher = watcher
        plan = self._plan
        watched, plain = (self._modules, ()) if plan is None else (plan.watched, plan.known)
        if plan is not None:
            begin = Hook(self._guarded, self._begin)
            outermost = [m for m in plan.outermost if m not in plan.watched]
            self._hooks += [ModuleHook(m, begin, before=True) for m in outermost]
            take = Hook(self._guarded, self._take)
            # The hook goes first, so that the output still is the function's result.
            self._hooks += [ModuleHook(m, take, before=False, first=True) for m in plain]
        for modules, enter, leave in (
            (watched, self._enter, self._leave),
            ([*self._closed, *plain] if watched else (), self._close, self._reopen),
        ):
            before, after = Hook(self._guarded, enter), Hook(self._guarded, leave)
            for module in modules:
                self._hooks.append(ModuleHook(module, before, before=True))
                first = gives_back(module)  # FSDP frees the parameters afterwards
                self._hooks.append(
                    ModuleHook(module, after, before=False, always=True, first=first)
                )
        self._room.make(self._levels + FRAMES)
        for hook in self._hooks:
            hook.put_on()

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs, or the module whose plain hook is running."""
        plain = self._running.plain
        return self.forward.module if plain is None else plain

    @property
    def is_closed(self) -> bool:
        """Whether a module runs whose functions must not be watched."""
        return self._running.closed is not None

    @property
    def number(self) -> int:
        """The number of the innermost forward call; 0 outside of watched forward calls."""
        forwards = self._running.forwards
        return forwards[-1].number if forwards else 0

    @property
    def forward(self) -> Forward:
        """The innermost forward call."""
        return self._running.forwards[-1]

    @property
    def running(self) -> Sequence[Forward]:
        """All running forward calls, outermost first."""
        return self._running.forwards

    @property
    def is_outermost(self) -> bool:
        """Whether the innermost forward call is not nested in another one."""
        return len(self._running.forwards) == 1

    @property
    def around(self) -> list[nn.Module]:
        """The modules whose forward calls contain the innermost one, outermost first."""
        return [forward.module for forward in self._running.forwards[:-1]]

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

    def is_written(self, tensor: Tensor) -> None:
        """Save a tensor's value for the running forward calls before the tensor is written to."""
        copy = tensor.detach().clone()
        for forward in self._running.forwards:
            forward.written.setdefault(id(tensor), copy)

    def remove(self) -> None:
        """Remove the hooks and this thread's mode.

        If forward calls run in other threads, the last one to end removes the hooks, because the
        hooks remove their thread's mode.
        """
        self._active = False
        call_all(self._unwind, self._take_off, self._room.leave)

    def _take_off(self) -> None:
        if self._inside.isdisjoint(thread.ident for thread in threading.enumerate()):
            call_all(*[hook.remove for hook in self._hooks])
            self._hooks.clear()
            vars(self).pop("_watcher", None)  # a cycle would keep gradients until it is collected

    @property
    def _is_watching(self) -> bool:
        return self._active and not self._guard.broken

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook, and track the running forward calls even after failures."""
        if torch.compiler.is_compiling():
            return
        state = ThreadState()
        try:
            if is_seen():
                run_apart(body, *args)
            else:
                body(*args)
        except BaseException as error:
            state.put_back()
            self._unwind()
            if not isinstance(error, Exception):
                self._guard.broken = True
                raise
            self._guard.failed(error)

    def _unwind(self) -> None:
        """Forget the forward calls of this thread and remove its mode."""
        running = self._running
        running.forwards.clear()
        self._inside.discard(threading.get_ident())
        running.closed, running.again, running.inside = None, 0, ""
        mode, modes = running.mode, function_modes()
        if mode is not None:
            mode.ended = True  # whatever suspends it, or restores modes, leaves it out
        if mode in modes:
            surely(set_function_modes, modes)
            running.mode = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        if module not in self._modules:
            return
        if running.forwards and _is_over(running.forwards, module):
            self._unwind()
        if self._plan is None and self._is_watching:
            with torch._C.DisableTorchFunction():
                around = {f.module: (*f.args, *f.kwargs.values()) for f in running.forwards}
                self.runs.begins(module, (*args, *kwargs.values()), around)
        begins = not running.forwards
        if begins and (not self._may_begin(args) or self._hands_over(module, args, kwargs)):
            return
        forward = Forward(
            module,
            args,
            kwargs,
            random=Randomness(self._devices),
            written={},
            number=next(self._numbers),
        )
        if begins:
            if running.mode is not None:  # left by a forward pass that was interrupted
                self._unwind()
            self._inside.add(threading.get_ident())
            running.mode = _Mode(self._watcher, self._guard)
            running.mode.__enter__()  # type: ignore[no-untyped-call]
        running.forwards.append(forward)
        if len(running.forwards) > self._levels:  # recursion: a module calls itself
            self._levels *= 2
            self._room.make(self._levels + FRAMES)
        if self._is_watching:
            with torch._C.DisableTorchFunction():
                self._watcher.begins(forward)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let a successor take over, where plain hooks are on the modules inside."""
        if not (is_rerun() or self._running.forwards) and self._may_begin(args):
            self._hands_over(module, args, kwargs)

    def _take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_rerun() or not (self._is_watching and torch.is_grad_enabled()):
            return
        known = None if self._plan is None else self._plan.known.get(module)
        if known is None:
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
        """Let a successor follow the pass if there is one; return whether this one must not."""
        successor = self._renew()
        if successor is None:
            return not self._active
        # Torch listed the hooks of this call before the successor added its own.
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
        if running.closed is not None and running.closed[0] is module:
            running.again += 1
        if running.mode is None or running.closed is not None:
            return
        if _get_current_function_mode() is running.mode:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
            running.closed, running.mode = (module, running.mode), None
        else:  # another mode is on inside and must stay on top
            running.closed = module, None

    def _reopen(self, module: nn.Module, *others: object) -> None:
        if is_rerun() is not self._repeated:
            return
        running = self._running
        if running.closed is None or running.closed[0] is not module:
            return
        if running.again:
            running.again -= 1
        else:
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
    """Run functions outside of any forward pass: the watching modes are off inside this context."""
    modes = function_modes()
    try:
        while isinstance(_get_current_function_mode(), _Mode):  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
        yield
    finally:
        surely(set_function_modes, modes)


def _on_its_path(forward: Function) -> Function:
    """Return a forward that takes torch's fast path, with other rounding, as without a mode.

    Torch takes it where nothing requires gradients, unless a function mode or a hook is on.
    """

    @wraps(forward)
    def as_unwatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden: list[HiddenTable] = []
        modes = function_modes()

        def put_back() -> None:
            show_hooks(hidden)
            set_function_modes(modes)

        try:
            try:
                with suppress(Exception):
                    _hide(module, hidden)
                return forward(module, *args, **kwargs)
            finally:
                put_back()
        except BaseException:  # an interrupt may have come between, or in the middle
            put_back()
            raise

    return as_unwatched


def _hide(module: nn.Module, hidden: list[HiddenTable]) -> None:
    """Hide hooks and modes from a module that may take its fast path."""
    if module.training or is_rerun():  # what runs again shows every function
        return
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return
    while isinstance(_get_current_function_mode(), _Mode):  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    hide_hooks(module.modules(), hidden)


# Also where no hook is: a teacher in a list, a copy, a forward that is called itself.
for _kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder):
    replace_meanwhile(_kind, "forward", _on_its_path(_kind.forward))


def _is_over(forwards: Sequence[Forward], module: nn.Module) -> bool:
    """Return whether an interrupt ended a forward of this module that still counts as running.

    Torch calls no hooks in that case, so the call stack is read, which includes the new call.
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
