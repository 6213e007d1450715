"""Runs the hooks of layers in backward passes, and follows their parameters' gradients."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn

from adiv_monitor.capture.accumulation import Accumulated, Accumulation
from adiv_monitor.capture.gradient_shares import Shares
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, holds_memory, trains
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.shard_accumulation import ShardAccumulation, is_zero
from adiv_monitor.capture.world import world_size
from adiv_monitor.rerun.thread import ThreadState, is_seen, run_apart


class _Pass(threading.local):
    """The backward pass that runs in a thread.

    Attributes:
        task: the number of its graph task.
        trains: whether it belongs to a training step.
        is_alone: whether there is one rank.
        state: torch's settings in its hooks.
        autocast: whether autocast is on.
        is_seen: whether modes or hooks of the training would see what its hooks compute.
    """

    def __init__(self) -> None:
        self.task = -1
        self.trains = False
        self.is_alone = True
        self.state = ThreadState()
        self.autocast = False
        self.is_seen = False

    def begins(self, task: int, seen: bool) -> None:
        """Read what holds for the whole pass."""
        self.trains = False
        self.is_alone = world_size() == 1
        self.autocast = torch._C._is_any_autocast_enabled()
        self.is_seen = seen
        self.task, self.state, self.trains = task, ThreadState(), trains(None)


class BackwardHooks:
    """Runs hooks on gradients, for layers that are still watched. See `Owner`.

    Args:
        layers: the layers.
        shares: the shares in their parameters' gradients.

    Attributes:
        passes: follows the backward passes.
    """

    def __init__(self, layers: Layers, shares: Shares) -> None:
        self._layers = layers
        self._shares = shares
        self._provenance = layers.provenance
        self._guard, self.passes = layers.context.guard, layers.context.passes
        self._accumulations: dict[int, Accumulation] = {}  # by id of a parameter
        self._verdict = (-1, False)
        self._verdict_of_shards = (-1, False)
        self._running = _Pass()
        self._awaited = -1  # the backward pass for whose end a callback is queued
        self._active = True  # hooks in graphs that are already built outlive their removal

    def detach(self) -> None:
        """Remove every hook; hooks in graphs that are already built become inactive."""
        self._active = False
        call_all(*[accumulation.remove for accumulation in self._accumulations.values()])
        self._accumulations.clear()  # breaks a cycle that would keep gradients alive

    # --- hooks -----------------------------------------------------------------------------------

    def for_layers(
        self, paths: Sequence[str], function: Callable[..., None], *args: Any
    ) -> Callable[..., None]:
        """Return a hook that calls a function for some layers, with these arguments first."""
        return partial(BackwardHooks._guarded, self, paths, function, *args)

    def hook(self, parameter: nn.Parameter, function: Callable[..., None], *args: Any) -> Hook:
        """Return a hook on a parameter; see `Owner.hook`."""
        return Hook(BackwardHooks._guarded, self, self._layers.led[id(parameter)], function, *args)

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

    # --- the gradients of parameters -------------------------------------------------------------

    def follow_gradient(self, layer: Layer) -> None:
        """Follow the gradient of a watched layer's first parameter."""
        parameter = layer.parameters[0]
        key = id(parameter)
        if key not in self._accumulations:
            self._accumulations[key] = self._accumulation(parameter)
            self._accumulations[key].attach()

    def _accumulation(self, parameter: nn.Parameter) -> Accumulation:
        stand_in = self._provenance.stand_in(parameter)
        if stand_in is None:
            return Accumulation(parameter, self)
        return ShardAccumulation(parameter, stand_in, self, self._provenance.waiting(parameter))

    def accumulation_of(self, layer: Layer) -> Accumulation:
        """Return the gradient accumulation of the layer's first parameter."""
        return self._accumulations[id(layer.parameters[0])]

    def users(self, parameter: nn.Parameter) -> list[Accumulated]:
        """Return the rows and shares that depend on a parameter's gradient."""
        key, rows = id(parameter), self._layers.rows
        led = self._layers.led[key]
        found: list[Accumulated] = [rows[path] for path in led if path in rows]
        found += self._shares.led_by(key)
        return found

    @property
    def is_alone(self) -> bool:
        """Whether there was one rank when the running backward pass began."""
        return self._running.is_alone

    def accumulates(self) -> None:
        """Queue sampling of gradients for the end of this pass, after ranks have averaged them."""
        task = torch._C._current_graph_task_id()
        if self._awaited == task:
            return
        self._awaited = task
        self.passes.accumulates(task)
        if self.is_alone:
            return
        engine = torch.autograd.Variable._execution_engine
        # Averaging hooks queue such callbacks too; a callback that queues another one runs last.
        engine.queue_callback(lambda: engine.queue_callback(self._pass_ended))

    def _pass_ended(self) -> None:
        for key, accumulation in self._accumulations.items():
            self._guarded(self._layers.led[key], accumulation.pass_ended, accumulation.held)

    def was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Return whether `.grad` was zeroed in place since the last pass.

        The device is read at one parameter per pass: the first whose last gradient was not zero.
        """
        task = torch._C._current_graph_task_id()
        if self._verdict[0] != task:
            is_zero, was_zero = torch.stack([now == 0, left == 0]).tolist()
            if was_zero:
                return False
            self._verdict = task, is_zero
        return self._verdict[1]

    def shards_were_zeroed(self) -> bool:
        """Return whether `.grad` of all sharded parameters was zeroed in place before this pass."""
        task = torch._C._current_graph_task_id()
        if self._verdict_of_shards[0] != task:
            parts = list(self._provenance.sharded)
            self._verdict_of_shards = task, is_zero(parts)
        return self._verdict_of_shards[1]
