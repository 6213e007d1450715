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

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows, exact
from adiv_monitor.hook import Hook, ModuleHook, trains
from adiv_monitor.layer_rows import Call, LayerRows
from adiv_monitor.selection import Layer
from adiv_monitor.updates import some


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
        generator: torch.Generator,
        attainable: bool,
        unchecked: set[str],
        fail: Callable[[Layer, Exception], None],
    ) -> None:
        self.rows = {layer.path: LayerRows(max_rows, generator) for layer in layers}
        self._attainable = attainable
        self._unchecked = unchecked
        self._fail = fail
        self._active = True  # hooks in graphs that are already built outlive their removal
        self._accumulated: dict[nn.Parameter, _Accumulated] = {}
        # Of an embedding's gradient nearly all is zero: spaced entries would miss the rest.
        self._sparse = {x.weight for x in layers if isinstance(x.module, nn.Embedding)}
        self._handles: list[RemovableHandle | ModuleHook] = []
        sharing: dict[nn.Parameter, list[Layer]] = defaultdict(list)
        for layer in layers:
            hook = partial(self._guarded, layer, partial(self._on_forward, layer))
            self._handles.append(ModuleHook(layer.module, hook, before=False))
            sharing[layer.parameters[0]].append(layer)
        for parameter, users in sharing.items():
            before = Hook(partial(self._guarded, users[0], self._on_accumulate, parameter, users))
            after = Hook(partial(self._guarded, users[0], self._on_accumulated))
            handle = parameter.register_hook(before)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            handle = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def detach(self) -> None:
        """Remove every hook; those in graphs that are already built fall silent."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def saw_calls(self) -> bool:
        """Whether any layer was called with gradients enabled."""
        return any(rows.calls for rows in self.rows.values())

    def dropped(self) -> bool:
        """Whether rows were thrown away because their gradient never made a step."""
        return any(rows.dropped for rows in self.rows.values())

    def gradient_factor(self, layer: Layer) -> Tensor | None:
        """‖gradient now‖ / ‖gradient that backward left‖; None if no backward pass left any.

        From 16,384 entries, spread evenly, of the layer's first trained parameter (of an embedding,
        from all).
        """
        parameter = layer.parameters[0]
        if parameter not in self._accumulated or parameter.grad is None:
            return None
        # Read, not told from the version counter: AMP's unscaling leaves that as it was.
        before = self._accumulated[parameter].norm
        return torch.where(before > 0, self._norm(parameter) / before, 1.0)

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
        # What runs inside a backward pass is a recomputation: it counts if a gradient comes.
        counted = torch._C._current_graph_task_id() == -1
        rows = rows_of_layer.choose(tuple(z.shape[:-1]), output.device, counted)
        features = layer.rule.function(module, rows, *args, **kwargs)
        z_squared = rows.squares(z)
        if layer.path in self._unchecked and len(z_squared):
            rows_of_layer.linear = reproduces(layer, features, rows.take(z))
        call = Call(rows, _trained(layer, features), z_squared, counted)
        if self._attainable:
            every = Rows(rows.shape)
            call.every_row = _trained(layer, layer.rule.function(module, every, *args, **kwargs))
        rows_of_layer.calls.append(call)
        arrive = partial(self._guarded, layer, partial(self._on_gradient, layer, call))
        call.hook = weakref.ref(arrive)
        output.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _on_gradient(self, layer: Layer, call: Call, gradient: Tensor) -> None:
        gradient = layer.rule.layout(layer.module, gradient)
        self.rows[layer.path].count(call)
        call.arrive(call.rows.take(gradient))
        if call.every_row is not None:
            call.every_gradient = Rows(call.rows.shape).take(gradient)
        elif self._attainable:  # a second pass through one graph: its rows are summed up already
            self.rows[layer.path].ceiling_is_whole = False

    def _on_accumulate(self, parameter: nn.Parameter, users: list[Layer], _: Tensor) -> None:
        """Just before a gradient is added to `.grad`: is there still what was there before?"""
        rows = [self.rows[layer.path] for layer in users if layer.path in self.rows]
        held = parameter.grad
        reset = held is None
        if held is not None and any(c.gradient is not None for r in rows for c in r.calls):
            left = self._accumulated.get(parameter)  # none yet after a mere autograd.grad
            same = left is not None and left.holds(held)
            # Zeroed in place? Only when something did change or replace it, is it worth a look.
            reset = not same and not bool(held.any())
        for layer_rows in rows:
            layer_rows.fold(reset)

    def _on_accumulated(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # None: an optimizer that steps inside the backward pass
            self._accumulated[parameter] = _Accumulated(parameter.grad, self._norm(parameter))

    def _norm(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        whole = parameter in self._sparse
        looked_at = exact(parameter.grad.detach() if whole else some(parameter.grad))
        norm: Tensor = torch.linalg.vector_norm(looked_at)
        return norm


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


class _Accumulated:
    """A parameter's `.grad` as the last backward pass left it."""

    def __init__(self, gradient: Tensor, norm: Tensor) -> None:
        self.norm = norm
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def holds(self, gradient: Tensor) -> bool:
        """Whether this is that tensor, and nothing has written to it since."""
        return self._gradient() is gradient and gradient._version == self._version
