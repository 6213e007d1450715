"""Hooks that gather some rows of every layer during one step: features, output norms, gradients.

The gradient of a layer's output is caught by a hook on the output tensor, so that in-place
activations, modules that are called several times and checkpointing all work:

- several calls and micro-batches: every call is kept with its own gradient;
- re-entrant checkpointing: the first pass has no gradient graph and is skipped;
- other checkpointing: the recomputation's output never receives a gradient and is dropped;
- gradients that are zeroed before a step is taken (a skipped AMP step): their rows go with them.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.accumulation import Accumulation
from adiv_monitor.capture.hook import Hook, ModuleHook, trains
from adiv_monitor.capture.layer_rows import Call, Chooser, LayerRows
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.whole import squares
from adiv_monitor.maths import dots


class Capture:
    """All hooks on the layers for one measured step.

    Args:
        layers: the layers to watch.
        max_rows: rows to look at per layer; None: all.
        generator: the monitor's own source of chance.
        attainable: gather all rows too, for the ceiling.
        unchecked: paths of the layers whose rule has not yet been checked against the output.
        fail: called with a layer and the exception that its hook met; from then on the layer is
            not watched any more.
    """

    def __init__(
        self,
        layers: list[Layer],
        *,
        max_rows: int | None,
        generator: np.random.Generator,
        attainable: bool,
        unchecked: set[str],
        fail: Callable[[Layer, Exception], None],
    ) -> None:
        chooser = Chooser(max_rows, generator)
        self.rows = {layer.path: LayerRows(chooser) for layer in layers}
        self._attainable = attainable
        self._unchecked = unchecked
        self._fail = fail
        self._active = True  # hooks in graphs that are already built outlive their removal
        self._verdict = (-1, False)
        self._handles: list[RemovableHandle | ModuleHook] = []
        sharing: dict[nn.Parameter, list[Layer]] = defaultdict(list)
        for layer in layers:
            hook = partial(self._guarded, layer, partial(self._on_forward, layer))
            self._handles.append(ModuleHook(layer.module, hook, before=False))
            sharing[layer.parameters[0]].append(layer)
        self.accumulated = {
            parameter: Accumulation(
                parameter,
                partial(self._watched, users),
                self._was_zeroed,
                partial(self._hook, users[0]),
            )
            for parameter, users in sharing.items()
        }

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built fall silent."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for accumulated in self.accumulated.values():
            accumulated.remove()
        self.accumulated.clear()  # they refer to this: a cycle that would hold gradients back

    def saw_calls(self) -> bool:
        """Whether any layer was called with gradients enabled."""
        return any(rows.calls for rows in self.rows.values())

    def dropped(self) -> bool:
        """Whether rows were thrown away because their gradient never made a step."""
        return any(rows.dropped for rows in self.rows.values())

    def _watched(self, layers: list[Layer]) -> list[LayerRows]:
        return [self.rows[layer.path] for layer in layers if layer.path in self.rows]

    def _was_zeroed(self, now: Tensor, left: Tensor) -> bool:
        """Whether `.grad` was zeroed in place: at one parameter of every pass, the device tells.

        At the first whose gradient was not zero anyway.
        """
        task = torch._C._current_graph_task_id()
        if self._verdict[0] != task:
            is_zero, was_zero = torch.stack([now == 0, left == 0]).tolist()
            if was_zero:
                return False
            self._verdict = task, is_zero
        return self._verdict[1]

    def _hook(self, layer: Layer, function: Callable[..., None]) -> Hook:
        return Hook(partial(self._guarded, layer, function))

    def _guarded(self, layer: Layer, function: Callable[..., None], *args: Any) -> None:
        if not self._active or layer.path not in self.rows or not trains(args[-1]):
            return
        try:
            with torch.no_grad(), without_autocast(layer.parameters[0]):
                function(*args)
        except Exception as error:
            self.rows.pop(layer.path, None)
            self._fail(layer, error)

    def _on_forward(
        self, layer: Layer, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if module is not layer.module:
            raise TypeError(
                "another module runs in its place: it was replaced, or replicated (nn.DataParallel)"
            )
        if not isinstance(output, Tensor):
            raise TypeError(f"its forward gave a {type(output).__name__}, expected a tensor")
        if not output.requires_grad:
            return
        z = layer.rule.layout(module, output)
        rows_of_layer = self.rows[layer.path]
        rows, chosen = rows_of_layer.choose(tuple(z.shape[:-1]), output.device)
        features = layer.rule.function(module, rows, *args, **kwargs)
        taken = rows.take(z)
        if layer.path in self._unchecked and len(taken):
            rows_of_layer.linear = reproduces(layer, features, taken)
        whole = layer.rule.whole(module, *args, **kwargs) if layer.weight is not None else None
        if whole is not None:
            whole = whole.restrict(weight=True, bias=layer.bias is not None)
        call = Call(rows, chosen, _trained(layer, features), taken, whole)
        if self._attainable:
            every = Rows(rows.shape, None, rows.device)
            call.every_row = _trained(layer, layer.rule.function(module, every, *args, **kwargs))
        rows_of_layer.calls.append(call)
        arrive = partial(self._guarded, layer, partial(self._on_gradient, layer, call))
        call.hook = weakref.ref(arrive)
        output.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _on_gradient(self, layer: Layer, call: Call, gradient: Tensor) -> None:
        norms = dots.sample_norms(gradient) if call.whole is None else None
        gradient = layer.rule.layout(layer.module, gradient)
        size = squares(gradient).reshape(-1) if norms is None else norms
        call.arrive(call.rows.take(gradient), size, torch.finfo(gradient.dtype).eps)
        if call.every_row is not None:
            call.every_gradient = Rows(call.rows.shape).take(gradient)
        elif self._attainable:  # a second pass through one graph: its rows are summed up already
            self.rows[layer.path].ceiling_is_whole = False


def reproduces(layer: Layer, features: Features, z: Tensor) -> Tensor:
    """‖Θφ − z‖ / ‖z‖ on the rows: 0 up to rounding if the rule describes this layer."""
    weight = getattr(layer.module, layer.rule.weight, None)
    bias = getattr(layer.module, layer.rule.bias, None)
    rest = z
    if weight is not None and (part := features.by_weight(weight)) is not None:
        rest = rest - part
    if bias is not None and (part := features.by_bias(bias)) is not None:
        rest = rest - part
    error: Tensor = torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(z)
    return error


def _trained(layer: Layer, features: Features) -> Features:
    return features.restrict(weight=layer.weight is not None, bias=layer.bias is not None)
