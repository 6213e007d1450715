"""Rows of a recurrent call's layers, computed by unrolling it when its gradients arrive."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, on_gradient
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.features.recurrent import Map, RecurrentCall, unroll


@dataclass(eq=False)
class LateRows:
    """A recurrent call, kept from its forward pass to the end of the step or of its graph.

    Only hooks on its outputs hold it, so that it is freed with the graph.

    Attributes:
        call: the call.
        calls: the calls of the watched layers, by name of the map.
        receive: receives the unrolled map of each of them.
    """

    call: RecurrentCall
    calls: dict[str, Call]
    receive: Callable[[Call, Map], None]
    _gradients: list[Tensor | None] = field(default_factory=list)
    _backward: int = -1  # the backward pass of the gradients
    _hooks: list[RemovableHandle] = field(default_factory=list)

    def watch(
        self,
        outputs: tuple[Tensor, ...],
        weights: Sequence[Tensor],
        guard: Callable[..., Callable[..., None]],
    ) -> None:
        """Register hooks on the outputs, and on the weights, whose gradients come later."""
        for i, output in enumerate(outputs):
            arrive = guard(partial(self._arrive, i, len(outputs)))
            self._hooks.append(on_gradient(output, arrive))
        hook = Hook(guard(partial(_settle, weakref.ref(self))))  # a parameter outlives the graph
        for weight in weights:
            if weight.requires_grad:
                handle: RemovableHandle = weight.register_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def remove(self) -> None:
        """Remove the hooks, which frees this object."""
        call_all(*(hook.remove for hook in self._hooks))

    def settle(self) -> None:
        """Unroll the call: a weight's gradient arrives after all gradients of the outputs."""
        if self._backward != torch._C._current_graph_task_id():
            return
        for linear in unroll(self.call, self._gradients):
            if linear.use.part in self.calls:
                self.receive(self.calls[linear.use.part], linear)
        self._gradients, self._backward = [], -1

    def _arrive(self, output: int, count: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._gradients, self._backward = [None] * count, task
        self._gradients[output] = gradient.detach()


def _settle(late: weakref.ref[LateRows], _: Tensor) -> None:
    if (rows := late()) is not None:
        rows.settle()
