"""Rows of a recurrent call's layers, computed by unrolling it when its gradients arrive."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
    _arrived: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by pass, by output

    def watch(
        self,
        outputs: tuple[Tensor, ...],
        weights: Sequence[Tensor],
        guard: Callable[..., Callable[..., None]],
    ) -> list[RemovableHandle]:
        """Register hooks on the outputs, and on the weights, whose gradients come later."""
        hooks = [
            on_gradient(output, guard(partial(self._arrive, i))) for i, output in enumerate(outputs)
        ]
        hook = Hook(guard(partial(_settle, weakref.ref(self))))  # a parameter outlives the graph
        trained = [weight for weight in weights if weight.requires_grad]
        return hooks + [weight.register_hook(hook) for weight in trained]  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Unroll the call: a weight's gradient arrives after all gradients of the outputs."""
        found = self._arrived.pop(torch._C._current_graph_task_id(), None)
        for linear in () if found is None else unroll(self.call, found):
            if linear.use.part in self.calls:
                self.receive(self.calls[linear.use.part], linear)

    def _arrive(self, output: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        self._arrived.setdefault(task, {})[output] = gradient.detach()


def _settle(late: weakref.ref[LateRows], _: Tensor) -> None:
    if (rows := late()) is not None:
        rows.settle()
