"""Catches sampled rows of each use: features, outputs and, in the backward pass, gradients.

A hook on a layer's output tensor receives its gradient. In-place activations, modules that are
called several times and checkpointing therefore all work:

- several calls and micro-batches: every call is kept with its own gradient;
- re-entrant checkpointing: the first pass has no gradient graph and is skipped;
- other checkpointing: the recomputed output never receives a gradient and is dropped;
- gradients that are zeroed before a step (a skipped AMP step): their rows are dropped too;
- recurrent functions, which hide their rows: a replay in the backward pass computes the rows;
- parameters without a rule: measured through the output of the module that holds them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from adiv_layers.autocast import without_autocast
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.check import Equations, of_gradient
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import has_data, on_gradient
from adiv_monitor.capture.layer_rows import Arrived, Call, LayerRows, versions
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.passes import Pass
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import gradient as gradient_of
from adiv_monitor.capture.weights.shards import is_shard
from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.recurrent import RecurrentCall, unroll
from adiv_monitor.features.rows import behind_view, norms
from adiv_monitor.features.uses import Use, as_it_is

Layout = Callable[[Tensor], Tensor]


class Catch:
    """Chooses rows of uses and puts hooks on their outputs.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._rows = layers.rows
        self._context = layers.context
        self._guard, self._passes = layers.context.guard, layers.context.passes
        self._provenance = layers.provenance
        self._nodes: dict[int, Any] = {}  # that accumulate gradients, by id of the parameter
        self._hooks: list[RemovableHandle] = []  # on nodes of the graph, and on parameters
        self._active = True  # hooks in graphs that are already built outlive their removal

    def detach(self) -> None:
        """Remove the hooks: a tensor that outlives its graph would keep the calls alive."""
        self._active = False
        self._nodes.clear()
        call_all(*[hook.remove for hook in self._hooks])
        self._hooks.clear()

    # --- the forward pass ------------------------------------------------------------------------

    def use(self, layer: Layer, use: Use, output: Tensor) -> None:
        """Catch rows of a use, and put a hook on its output."""
        rows = self._rows.get(layer.path)
        if rows is None:
            return
        z = use.layout(output)
        call = rows.new_call(tuple(z.shape[:-1]), z.device)
        features = self._look(call, use, z)
        is_ruled = layer.module in self._layers.selection.rules
        if is_ruled and layer.path not in self._context.checked and len(call.z):
            rows.linear = reproduces(use, features, call.z)
        tensor, layout = at_gradient(output, use.layout)
        arrive = partial(self._reached, (layer.path,), self._arrives, call, layout)
        self._hooks.append(on_gradient(tensor, arrive))

    def maps(self, made: RecurrentCall, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Choose rows of the maps in a recurrent call, and put hooks on its outputs."""
        calls: dict[str, Call] = {}
        used: list[Tensor] = []
        for use in made.uses:
            used += [tensor for tensor in (use.weight, use.bias) if tensor is not None]
            layer = self._layers.of(use)
            if layer is not None and layer.path in self._rows:
                rows = self._rows[layer.path]
                calls[use.part] = call = rows.new_call((made.rows,), made.input.device)
                call.precision = made.precision
        if calls:
            paths = [call.layer.path for call in calls.values()]
            arrive = partial(self._reached, paths, self._unrolled, made, calls)
            self._hooks.append(register_multi_grad_hook(outputs, arrive))
        return used

    def _look(self, call: Call, use: Use, z: Tensor) -> Features:
        """Take the rows of a call, and return their features, untrained ones included."""
        layer, rows, check = call.layer, call.rows, self._context.check
        features = use.features(rows)
        call.features = features.restrict(**layer.trained)
        call.z = rows.copied(z)
        if layer.weight is not None:
            call.whole = use.whole(rows)
            if call.whole is not None and layer.bias is None:
                call.whole = replace(call.whole, bias_square=0.0)
        if rows.total and check is not None and check.only in (None, layer.path):
            call.products = check.products(layer, use, features, rows)
        return features

    # --- the backward pass -----------------------------------------------------------------------

    def _reached(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        """Run the body of a hook, and keep its failures away from the backward pass.

        The last argument is None where the loss does not depend on this output of a function.
        """
        if self._active and args[-1] is not None:
            self._guard(self._run, paths, function, *args)

    def _run(self, paths: Sequence[str], function: Callable[..., None], *args: Any) -> None:
        """Call a function for layers. If it fails, they are not watched any more."""
        running, watched = self._passes.running(), self._rows.keys() & paths
        if not (running.trains and watched and has_data(args[-1])):
            return
        torch._C._set_grad_enabled(False)
        try:
            with without_autocast(self._rows[min(watched)].layer.parameters[0]):
                function(running, *args)
        except Exception as error:
            for path in watched:
                self._layers.failed(path, error)
        finally:
            torch._C._set_grad_enabled(running.has_graph)

    def _arrives(self, running: Pass, call: Call, layout: Layout, gradient: Tensor) -> None:
        """Take the gradient of a call's output."""
        gradient, rows, sums = layout(gradient), self._rows[call.layer.path], None
        if running not in rows.passes:
            self._begins(rows, call, running)
        if call.products is not None:
            sums, rows.v = call.products.contracted(gradient), call.products.v
        call.precision = max(call.precision, torch.finfo(gradient.dtype).eps)
        found = Arrived(call.rows.copied(gradient), norms(gradient).flatten(), sums)
        rows.passes[running][call] = found

    def _begins(self, rows: LayerRows, call: Call, running: Pass) -> None:
        """Begin a backward pass at a layer: what earlier passes left may have been zeroed."""
        lead = rows.layer.parameters[0]
        is_sharded = is_shard(lead)
        counts = is_sharded or self._accumulates(lead)
        # A gradient may not have reached its shard yet.
        waits = is_sharded and self._provenance.sharded.has_gradient(lead)
        if lead.grad is None and not waits:
            if rows.passes:
                rows.zeroed(running, self._passes)
            rows.earlier = None
        elif counts and not rows.counted:
            rows.earlier = _earlier(call)
        rows.versions, rows.passes[running] = versions(rows.layer), {}
        if counts:
            rows.counted.append(running)
            running.accumulates = True

    def _accumulates(self, parameter: nn.Parameter) -> bool:
        """Return whether the running backward pass accumulates the gradient of a parameter.

        `torch.autograd.grad` and passes from another graph do not.
        """
        key = id(parameter)
        if key not in self._nodes:
            if not parameter.requires_grad:
                return False
            torch._C._set_grad_enabled(True)
            viewed: Any = parameter.view_as(parameter).grad_fn
            torch._C._set_grad_enabled(False)
            self._nodes[key] = viewed.next_functions[0][0]
        try:
            return bool(torch._C._will_engine_execute_node(self._nodes[key]))
        except RuntimeError:  # `autograd.grad` of this very parameter
            return False

    def _unrolled(
        self,
        running: Pass,
        made: RecurrentCall,
        calls: dict[str, Call],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Take the rows of a recurrent call, once the gradients of its outputs are there."""
        given = {i: g.detach() for i, g in enumerate(gradients) if g is not None}
        for linear in unroll(made, given):
            call = calls.get(linear.use.part)
            if call is None or call.layer.path not in self._rows:
                continue
            if call not in self._rows[call.layer.path].calls:
                of_rows = affine(linear.inputs, linear.use.weight, linear.use.bias)
                self._look(call, of_rows, linear.z)
            self._arrives(running, call, as_it_is, linear.gradient)


def _earlier(call: Call) -> Equations | None:
    """Return γv of the gradient that is there before the layer's first pass."""
    layer = call.layer
    if any(map(is_shard, layer.parameters)) or call.products is None:
        return None
    parts = {piece.key: piece.own(gradient_of(piece.parameter)) for piece in layer.pieces}
    return of_gradient(call.features, *layer.change(parts), call.products.v)


def at_gradient(output: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Return where an output's gradient arrives, and what turns that into the gradient of z."""
    viewed = behind_view(output)
    if viewed is output:
        return output, layout
    shape, stride = output.shape, output.stride()  # of a view of the contiguous gradient's entries
    return viewed, lambda gradient: layout(gradient.contiguous().as_strided(shape, stride))


def reproduces(use: Use, features: Features, z: Tensor) -> Tensor:
    """Return ‖Θφ − z‖ / ‖z‖ on the rows, which is 0 up to rounding if the rule is right."""
    made = features.move(None if use.weight is None else use.shaped(use.weight), use.bias)
    return norms((z - made).flatten()) / norms(z.flatten())
