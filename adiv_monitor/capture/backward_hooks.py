"""Runs the hooks of layers in backward passes."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import nn
from torch.autograd.graph import get_gradient_edge

from adiv_monitor.capture.hook import holds_memory, trains
from adiv_monitor.capture.layers import Layers
from adiv_monitor.rerun.thread import ThreadState, is_seen, run_apart


class _Pass(threading.local):
    """The backward pass that runs in a thread.

    Attributes:
        task: the number of its graph task.
        trains: whether it belongs to a training step.
        state: torch's settings in its hooks.
        autocast: whether autocast is on.
        is_seen: whether modes or hooks of the training would see what its hooks compute.
    """

    def __init__(self) -> None:
        self.task = -1
        self.trains = False
        self.state = ThreadState()
        self.autocast = False
        self.is_seen = False

    def begins(self, task: int, seen: bool) -> None:
        """Read what holds for the whole pass."""
        self.trains = False
        self.autocast = torch._C._is_any_autocast_enabled()
        self.is_seen = seen
        self.task, self.state, self.trains = task, ThreadState(), trains(None)


class BackwardHooks:
    """Runs hooks on gradients, for layers that are still watched.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._guard = layers.context.guard
        self._running = _Pass()
        self._nodes: dict[int, Any] = {}  # that accumulate gradients, by id of the parameter
        self._active = True  # hooks in graphs that are already built outlive their removal

    def detach(self) -> None:
        """Make all hooks inactive, those in graphs that are already built, too."""
        self._active = False
        self._nodes.clear()

    def for_layers(
        self, paths: Sequence[str], function: Callable[..., None], *args: Any
    ) -> Callable[..., None]:
        """Return a hook that calls a function for some layers, with these arguments first."""
        return partial(BackwardHooks._guarded, self, paths, function, *args)

    def _guarded(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        """Run a hook's body for some layers. If it fails, they are not watched any more.

        The last argument is None where the loss does not depend on this output of a function.
        """
        if not self._active or args[-1] is None or self._guard.broken:
            return
        running, task = self._running, torch._C._current_graph_task_id()
        if task < 0 or task != running.task:
            self._guard(running.begins, task, is_seen())
        if running.trains:
            run = partial(run_apart, self._run) if running.is_seen else self._run
            self._guard.within(running.state, run, paths, function, *args)

    def _run(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        rows = self._layers.rows
        for path in paths:
            if path in rows:
                break
        else:
            return
        if not holds_memory(args[-1]):
            return
        gradients = torch.is_grad_enabled()
        try:
            if gradients:
                torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                if self._running.autocast:
                    with without_autocast(self._layers.found[path].parameters[0]):
                        function(*args)
                else:
                    function(*args)
        except Exception as error:
            for path in [path for path in paths if path in rows]:
                self._layers.failed(path, error)
        finally:
            if gradients:
                torch._C._set_grad_enabled(True)

    def accumulates(self, parameter: nn.Parameter) -> bool:
        """Return whether the running backward pass accumulates the gradient of a parameter.

        `torch.autograd.grad` and passes from another graph do not.
        """
        stand_in = self._layers.provenance.stand_in(parameter)
        used = parameter if stand_in is None else stand_in
        key = id(used)
        if key not in self._nodes:
            if not used.requires_grad:
                return False
            self._nodes[key] = get_gradient_edge(used).node
        try:
            return bool(torch._C._will_engine_execute_node(self._nodes[key]))
        except RuntimeError:  # `autograd.grad` of this very parameter
            return False
