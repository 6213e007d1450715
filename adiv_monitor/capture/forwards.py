"""Sees every function that is called inside the forwards of a model's modules."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from adiv_monitor.capture.again.randomness import Randomness
from adiv_monitor.capture.hook import ModuleHook, is_aside, is_replaying, trains
from adiv_monitor.capture.selection import Selection

Function = Callable[..., Any]


class _Mode(TorchFunctionMode):
    """Hands every call of a torch function to a watcher, which makes it."""

    def __init__(self, watcher: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A call."""
        if is_aside():
            return func(*args, **(kwargs or {}))
        return self._watcher(func, args, kwargs or {})


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
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Randomness
    written: dict[int, Tensor]
    number: int


class _Running(threading.local):
    """The forwards that run in a thread, the outermost first, and the mode that is on around."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.mode: _Mode | None = None
        self.inside = ""  # which function was opened
        self.closed: tuple[nn.Module, _Mode] | None = None


class Watcher(Protocol):
    """What is told of the forwards that run."""

    def called(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a torch function, and give what it gives."""
        ...

    def begins(self, forward: Forward) -> None:
        """A module's forward begins."""
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
    gradients are recorded, and inside modules that are not trained: some of torch's modules choose
    another way, with other roundings, while a mode is on and nothing asks for gradients.

    Args:
        modules: the modules that hold what is trained, be it further below.
        closed: modules among or below them that hold parameters, none of which is trained.
        devices: on which forwards may draw random numbers.
        repeated: watch repetitions of forward passes, and nothing but these.

    Attributes:
        strangers: a module ran in the place of one of these: its copy, with its hooks.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        closed: Collection[nn.Module],
        devices: Collection[torch.device],
        *,
        repeated: bool = False,
    ) -> None:
        self.strangers = False
        self._repeated = repeated
        self._modules = modules
        self._closed = closed
        self._running = _Running()
        self._devices = devices
        self._active = True
        self._numbers = count()
        self._watcher: Watcher
        self._hooks: list[ModuleHook] = []

    @classmethod
    def of(cls, selection: Selection, *, repeated: bool = False) -> "Forwards":
        """Those of the modules that hold what is to be measured."""
        devices = {p.device for p in selection.parameters} | {torch.device("cpu")}
        return cls(selection.modules, selection.closed, devices, repeated=repeated)

    def watch(self, watcher: Watcher) -> None:
        """Put the hooks on, for this watcher."""
        self._watcher = watcher
        self._hooks = [
            hook
            for several, enter, leave in (
                (self._modules, self._enter, self._leave),
                (self._closed, self._close, self._reopen),
            )
            for module in several
            for hook in (
                ModuleHook(module, enter, before=True),
                ModuleHook(module, leave, before=False, always=True),
            )
        ]

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs."""
        return self.forward.module

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

    def opened(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a Python function of torch's gives, with the calls inside it watched as well."""
        mode = self._running.mode
        assert mode is not None
        outside, self._running.inside = self._running.inside, function.__name__
        try:
            with mode:
                return without_overrides(function)(*args, **kwargs)
        finally:
            self._running.inside = outside

    def is_written(self, tensor: Tensor) -> None:
        """A tensor is about to be written to: the forwards that run have found it as it is now."""
        copy = tensor.detach().clone()
        for forward in self._running.forwards:
            forward.written.setdefault(id(tensor), copy)

    def remove(self) -> None:
        """Take the hooks off."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_replaying() is not self._repeated:
            return
        running = self._running
        if module not in self._modules:
            self.strangers = True
            return
        if not running.forwards:
            if not torch.is_grad_enabled() or not trains(args):
                return
            running.mode = _Mode(self._watcher.called)
            running.mode.__enter__()  # type: ignore[no-untyped-call]
        forward = Forward(
            *(module, args, kwargs, Randomness(self._devices), {}), number=next(self._numbers)
        )
        running.forwards.append(forward)
        with torch._C.DisableTorchFunction():
            self._watcher.begins(forward)

    def _close(self, module: nn.Module, *others: object) -> None:
        if is_replaying() is not self._repeated:
            return
        running = self._running
        if running.mode is not None and _get_current_function_mode() is running.mode:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
            running.closed, running.mode = (module, running.mode), None

    def _reopen(self, module: nn.Module, *others: object) -> None:
        if is_replaying() is not self._repeated:
            return
        running = self._running
        if running.closed is not None and running.closed[0] is module:
            _, running.mode = running.closed
            running.closed = None
            _push_mode(running.mode)  # type: ignore[no-untyped-call]

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_replaying() is not self._repeated:
            return
        running = self._running
        if not running.forwards or module is not running.forwards[-1].module:
            return
        try:
            if self._active:
                with torch._C.DisableTorchFunction():
                    self._watcher.ends(module, args, kwargs, output)
        finally:
            running.forwards.pop()
            if not running.forwards and running.mode is not None:
                mode, running.mode = running.mode, None
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


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
