"""Global hooks that show a watcher what the modules of a model do.

One pair of them sees every forward call in the process and looks the module up. Nothing is on the
model itself, so copies, pickles, scripts and torch's fast paths are as without a monitor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.forwards import OPENED, Called, Forward, Function
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.site import Site
from adiv_monitor.capture.trace import Plan
from adiv_monitor.capture.watching import Watching
from adiv_monitor.rerun.surroundings import Randomness, reruns
from adiv_monitor.rerun.thread import function_modes, set_function_modes


class _Mode(TorchFunctionMode):
    """Shows every call of a torch function to a watcher."""

    def __init__(self, watching: Watching, guard: Guard) -> None:
        super().__init__()
        self._watching = watching
        self._guard = guard

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle one call of a torch function."""
        given = kwargs or {}
        if getattr(func, "__name__", "") in OPENED:
            return self._watching.forwards.opened(func, *args, **given)
        call = Called(func, args, given, func(*args, **given))
        self._guard(self._watching.called, call)
        return call.result


class Watch:
    """The hooks of one step.

    A module whose use of its parameters is known needs one hook behind its forward, and nothing
    else. Where functions are watched, a mode is on in each thread from the beginning of the
    outermost watched forward to its end, so that modes nest as forward calls do and re-entrant
    checkpointing is covered. It is off inside modules that run with gradients disabled (except in
    reruns) or whose parameters are all frozen: some of torch's modules choose another path, with
    other rounding, while a mode is on and nothing requires gradients.

    Args:
        watching: sees what happens; its running forward calls are kept up here.
        guard: receives failures.
        plan: the modules with known uses, in which functions need not be watched; None: none.
    """

    def __init__(self, watching: Watching, guard: Guard, plan: Plan | None = None) -> None:
        self._forwards, self._watching, self._guard = watching.forwards, watching, guard
        selection = watching.selection
        self._depth = reruns()  # reruns within it are not watched
        self._devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        is_survey = plan is None and not self._depth
        self._surveyed = set(map(id, selection.modules if is_survey else ()))
        # Modules by their ids: other modules of the process need not be hashable.
        self._known: dict[int, Site | None] = dict.fromkeys(map(id, selection.rules))
        self._known.update(() if plan is None else plan.known)
        open_now = selection.modules if plan is None else plan.watched
        self._open = set(map(id, open_now)) - self._known.keys()
        both = (self._before, self._after) if self._open else (None, self._take)
        self._hooks = GlobalHooks(*both)
        # One for all: what restores the modes of before may bring it back.
        self._mode = _Mode(watching, guard)

    def put_on(self) -> None:
        """Register the hooks; call `remove` afterwards, even if this raises."""
        self._hooks.put_on()

    def remove(self) -> None:
        """Remove the hooks and this thread's mode."""
        call_all(self._watching.detach, self._unwind, self._hooks.remove)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._forwards.running or (id(module) in self._open and self._counts):
            self._guarded(self._enter, module, args)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        """Handle the end of a forward; without keyword arguments if it raised."""
        self._take(module, args, *more)
        kwargs, output = more if more[1:] else ({}, None)
        if id(module) in self._open or self._forwards.running:
            self._guarded(self._leave, module, args, kwargs, output)

    def _take(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        """Let the watcher take the use of a module whose use is known."""
        if id(module) in self._known and more[1:] and self._watching.active:
            self._guard(self._caught, module, args, *more)

    def _caught(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled()):
            return
        if reruns() != self._depth or not trains(output):
            return
        self._forwards.known = module
        torch._C._set_grad_enabled(False)
        try:
            self._watching.known(module, self._known[id(module)], args, kwargs, output)
        finally:
            torch._C._set_grad_enabled(True)
            self._forwards.known = None

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook; after a failure, nothing is watched any more."""
        if reruns() != self._depth:
            return
        try:
            self._guard(body, *args)
        finally:
            if self._guard.broken:
                self._unwind()

    @property
    def _counts(self) -> bool:
        """Whether forward calls that begin now can be part of what is watched."""
        return self._depth > 0 or torch.is_grad_enabled()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        running = self._forwards.running
        if running and running[0].module is module:  # an interrupt has ended its forward
            self._unwind()
        if not running:
            if not (self._watching.active and trains(args)):
                return
        elif not running[-1].is_open:
            return
        is_open = self._counts and id(module) in self._open
        is_apart = is_open or id(module) in self._known or not self._counts
        # Without trained parameters it is closed: nothing in it is measured.
        if not is_apart and {p.requires_grad for p in nn.Module.parameters(module)} != {False}:
            return  # a part of the forward around it
        running.append(Forward(module, Randomness(self._devices), is_open))
        self._switch()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        if id(module) in self._surveyed and output is not None:
            self._watching.ran(module, args, kwargs)
        running = self._forwards.running
        if not running or running[-1].module is not module:
            return
        try:
            if running[-1].is_open and output is not None and self._watching.active:
                self._watching.ends(module, args, kwargs, output)
        finally:
            running.pop()
            self._switch()

    def _switch(self) -> None:
        """Turn the mode on if functions of the innermost forward call are watched, else off."""
        forwards = self._forwards
        is_on = bool(forwards.running) and forwards.running[-1].is_open
        if is_on is (forwards.mode is not None):
            return
        others = [mode for mode in function_modes() if mode is not forwards.mode]
        if is_on:
            forwards.mode = self._mode
            set_function_modes([*others, forwards.mode])
        else:
            set_function_modes(others)
            forwards.mode = None  # afterwards: if it raises, the mode is still known

    def _unwind(self) -> None:
        """Forget the forward calls of this thread and remove its mode."""
        self._forwards.running.clear()
        self._forwards.inside = ""
        self._switch()
