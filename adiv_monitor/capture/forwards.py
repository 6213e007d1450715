"""Sees every function that is called inside the forwards of a model's modules."""

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.hook import ModuleHook, trains
from adiv_monitor.capture.randomness import Randomness

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
        return self._watcher(func, args, kwargs or {})


class _Running(threading.local):
    """The modules whose forwards run in a thread, and the mode that is on around them."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.began: list[Randomness] = []
        self.mode: _Mode | None = None


class Forwards:
    """Hooks on modules that let a watcher make all calls of torch functions inside them.

    The mode is on from the beginning of the outermost module's forward to its end, in each thread,
    so that it nests as forwards do, and re-entrant checkpointing is seen too.

    Args:
        modules: the modules.
        watcher: (function, args, kwargs) → what the call gives.
        begins: called when the outermost forward begins.
        ends: called with (module, args, kwargs, output) when a module's forward ends.
        devices: other than the host, whose generators forwards may draw from.

    Attributes:
        strangers: a module ran in the place of one of these: its copy, with its hooks.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        watcher: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any],
        begins: Callable[[], object],
        ends: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None],
        devices: Collection[torch.device],
    ) -> None:
        self.strangers = False
        self._modules = modules
        self._running = _Running()
        self._watcher = watcher
        self._begins = begins
        self._ends = ends
        self._devices = devices
        self._active = True
        self._hooks = [
            hook
            for module in modules
            for hook in (
                ModuleHook(module, self._enter, before=True),
                ModuleHook(module, self._leave, before=False, always=True),
            )
        ]

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs."""
        return self._running.modules[-1]

    @property
    def began(self) -> Randomness:
        """The generators as they were when its forward began."""
        return self._running.began[-1]

    @property
    def is_outermost(self) -> bool:
        """Whether no other module's forward runs around it."""
        return len(self._running.modules) == 1

    def remove(self) -> None:
        """Take the hooks off."""
        self._active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        running = self._running
        if module not in self._modules:
            self.strangers = True
            return
        if not running.modules:
            if not trains(args):
                return
            self._begins()
            running.mode = _Mode(self._watcher)
            running.mode.__enter__()  # type: ignore[no-untyped-call]
        running.modules.append(module)
        running.began.append(Randomness(self._devices))

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        running = self._running
        if not running.modules or module is not running.modules[-1]:
            return
        try:
            if self._active and output is not None:  # None: an exception came
                with torch._C.DisableTorchFunction():
                    self._ends(module, args, kwargs, output)
        finally:
            running.modules.pop()
            running.began.pop()
            if not running.modules and running.mode is not None:
                mode, running.mode = running.mode, None
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
