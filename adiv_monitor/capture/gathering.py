"""Gathers sampled rows of each use: features, outputs and, in the backward pass, gradients.

A hook on a layer's output tensor receives its gradient. In-place activations, modules that are
called several times and checkpointing therefore all work:

- several calls and micro-batches: every call is kept with its own gradient;
- re-entrant checkpointing: the first pass has no gradient graph and is skipped;
- other checkpointing: the recomputed output never receives a gradient and is dropped;
- gradients that are zeroed before a step (a skipped AMP step): their rows are dropped too;
- recurrent functions, which hide their rows: a replay in the backward pass computes the rows;
- parameters without a rule: measured through the output of the module that holds them.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.backward_hooks import BackwardHooks
from adiv_monitor.capture.captured_layer import CapturedLayer
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.gradient_shares import Handed, Shares, follow
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import holds_memory, on_gradient
from adiv_monitor.capture.late_rows import LateRows
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.shards import part_of
from adiv_monitor.capture.whole_modules.outputs import Outputs
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.recurrent import Map, RecurrentCall, Returned, uses_of
from adiv_monitor.features.rows import Rows, behind_view, norms
from adiv_monitor.features.uses import NESTED, Refused, Use, as_it_is
from adiv_monitor.maths import ceiling
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.twin import Arguments

_TWICE = (
    "functions with and without a rule use it in one module: only the uses with a rule are measured"
)


class Gathering:
    """Chooses rows of uses and puts hooks on their outputs. See `Takes`.

    Args:
        layers: the layers.
        forwards: the running forward calls.
        without_rule: measures modules as a whole.
    """

    def __init__(
        self,
        layers: Layers,
        forwards: Forwards,
        without_rule: ParametersWithoutRule,
    ) -> None:
        self._layers = layers
        self._shares = Shares(layers.provenance)
        self._backward = BackwardHooks(layers, self._shares)
        self._forwards = forwards
        self._without_rule = without_rule
        self._checked = layers.context.checked
        self._attainable = layers.context.attainable
        self._hooks: list[RemovableHandle] = []  # on nodes of the graph
        self._late: weakref.WeakSet[LateRows] = weakref.WeakSet()
        self._used: dict[Layer, int] = {}  # the number of the last forward call in which it was

    def detach(self) -> None:
        """Remove the hooks."""
        call_all(
            *(hook.remove for hook in self._hooks),
            *(late.remove for late in self._late),
            self._backward.detach,
        )
        self._hooks.clear()

    def captured(self, layer: Layer, calls: Sequence[Call], *, is_shared: bool) -> CapturedLayer:
        """Return what a step is measured from; see `CapturedLayer`.

        Args:
            layer: a layer that a gradient reached.
            calls: the calls through which it came.
            is_shared: whether other uses have a share in its parameters' gradient.
        """
        shares = self._shares.of(layer)
        return CapturedLayer(
            layer,
            calls,
            rows=self._layers.rows[layer.path],
            accumulation=self._backward.accumulation_of(layer),
            shares=self._shares.in_gradients(shares),
            is_moved=True in [share.is_moved for share in shares],
            is_shared=is_shared,
        )

    def use(
        self,
        use: Use,
        output: Tensor,
        known: Layer | str | None = None,
        *,
        checked: bool = True,
        inputs: Collection[Any] | None = None,
    ) -> Call | None:
        """Gather rows of a use and put a hook on its output; `_on_gradient` receives its G."""
        layer = self._layers.of(use, known)
        if layer is None:
            return None
        self._used[layer] = self._forwards.number
        if layer.path not in self._layers.rows:
            self._follow_shares(layer, [output], None)
            return None
        z = use.layout(part_of(output))
        rows_of_layer = self._layers.rows[layer.path]
        call = self._new_call(layer, tuple(z.shape[:-1]), output.device)
        features = self._look(call, use, z)
        if not checked and layer.path not in self._checked and len(call.z):
            rows_of_layer.linear = reproduces(use, features, call.z)
        rows_of_layer.add(call)
        self._follow_shares(layer, [output], inputs, call)
        viewed = behind_view(output)
        layout = use.layout
        if viewed is not output:
            layout = partial(as_view, use.layout, output.shape, output.stride())
        arrive = self._arrival(layer.path, layout, call)
        # `detach` removes the hook: a tensor that outlives its graph would keep the call alive.
        self._hooks.append(on_gradient(viewed, arrive))
        return call

    def maps(
        self,
        made: RecurrentCall,
        outputs: tuple[Tensor, ...],
        random: Randomness | None,
        inputs: Collection[Any],
    ) -> list[Tensor]:
        """Choose rows of the maps in a recurrent call and put hooks on its outputs."""
        if made.refusal is not None:
            raise Refused(made.refusal)
        calls: dict[str, Call] = {}
        used: list[Tensor] = []
        for use in uses_of(made):
            used += [tensor for tensor in (use.weight, use.bias) if tensor is not None]
            layer = self._layers.of(use)
            if layer is None:
                continue
            self._used[layer] = self._forwards.number
            self._follow_shares(layer, outputs, inputs)
            if layer.path in self._layers.rows:
                calls[use.part] = self._new_call(layer, (made.rows,), made.input.device)
        if not calls:
            return used
        returned = Returned.of(made, outputs)
        late = LateRows(made, returned, random, calls, self._expect, self._on_replay)
        for call in calls.values():
            call.precision = made.precision
            call.hook, call.replay = weakref.ref(late), weakref.WeakMethod(late.settle)
            self._layers.rows[call.layer.path].add(call)
        paths = [call.layer.path for call in calls.values()]
        late.watch(outputs, partial(self._backward.for_layers, paths))
        self._late.add(late)
        return used

    def whole(
        self,
        module: nn.Module,
        names: list[str],
        arguments: Arguments,
        outputs: Outputs,
        tensors: list[Tensor],
        inputs: Collection[Any],
    ) -> None:
        """Gather rows of a module that is measured as a whole and hook its output."""
        if not any(x.numel() for x in tensors):  # of an empty batch
            return
        left = [module.get_parameter(name) for name in names]
        given = tensors_in(*arguments[0], *arguments[1].values())
        if any(x.is_nested for x in (*tensors, *given)):
            self._without_rule.refuse(left, NESTED)
            return
        # When the module is rerun, a changed parameter acts in all of its uses there.
        twice = self._used_inside(left)
        self._without_rule.refuse(twice, _TWICE)
        names = [name for name, p in zip(names, left, strict=True) if p not in set(twice)]
        left = [module.get_parameter(name) for name in names]
        layer = self._layers.of_whole(module, left) if left else None
        if layer is None:
            return
        self._used[layer] = self._forwards.number
        if layer.path not in self._layers.rows:
            return
        rows_of_layer = self._layers.rows[layer.path]
        z = outputs.rows(tensors)
        call = self._new_call(layer, tuple(z.shape[:-1]), z.device)
        taken = call.rows.take(z)
        try:
            features = self._without_rule.features(
                module, names, arguments, outputs, taken, self._forwards.forward, call.rows
            )
            other = next(iter(rows_of_layer.calls), None)  # all calls have rows of one length
            if other is not None and other.z.shape[1] != taken.shape[1]:
                raise Refused("the rows of its output have another length at every call")
        except Refused as refusal:
            self._without_rule.refuse(left, str(refusal))
            self._layers.forget(layer.path)
            return
        self._follow_shares(layer, tensors, inputs)
        call.look(features, taken, None)
        rows_of_layer.add(call)
        outputs.hook(tensors, self._arrival(layer.path, as_it_is, call), self._layers.context.guard)

    def _used_inside(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the parameters that layers used since the running forward began."""
        last = self._forwards.number
        inside = {p for x, number in self._used.items() if number >= last for p in x.parameters}
        return [p for p in parameters if p in inside]

    def _follow_shares(
        self,
        layer: Layer,
        outputs: Sequence[Tensor],
        inputs: Collection[Any] | None,
        call: Call | None = None,
    ) -> None:
        """Record a call's contributions to its parameters' gradients through autograd hooks.

        Args:
            layer: the layer of the call.
            outputs: the result of the call.
            inputs: see `Takes.use`.
            call: the call, if its rows arrive before its contribution.
        """
        contributions = self._shares.of(layer)
        if inputs is None or layer.path not in self._layers.rows:
            for contribution in contributions:
                contribution.is_known = False
        elif contributions:
            path = layer.path
            arrive = self._backward.for_layers([path], Gathering._on_handed, self, path, call)
            watched = self._layers.rows
            self._hooks += follow(outputs, inputs, contributions, path, arrive, watched)

    def _on_handed(
        self,
        path: str,
        call: Call | None,
        handed: Handed,
        gradients: Sequence[Tensor | None],
        of_outputs: object,
    ) -> None:
        """Add the gradients that a node passes to parameters to the shares of their layers."""
        has_rows = call is not None and call.arrives_now
        for contribution, edge, moves in handed:
            contribution.has_rows &= has_rows
            gradient = gradients[edge]
            if gradient is None or not holds_memory(gradient):
                continue
            for move in moves:
                gradient = move(gradient)
            contribution.arrive(gradient)

    def _new_call(self, layer: Layer, shape: tuple[int, ...], device: torch.device) -> Call:
        self._backward.follow_gradient(layer)
        return self._layers.new_call(layer, shape, device)

    def _look(self, call: Call, use: Use, z: Tensor) -> Features:
        """Gather the rows of a call and return their features, untrained ones included."""
        layer, features = call.layer, use.features(call.rows)
        has_scales = layer.weight is not None and layer.is_direct
        whole = use.whole() if has_scales else None
        if whole is not None and layer.bias is None:
            whole = whole.of_weight()
        call.look(trained_of(layer, features), call.rows.take(z), whole)
        if self._attainable and call.rows.total and isinstance(features, ceiling.KNOWN):
            every = Rows(call.rows.shape, None, call.rows.device)
            call.every_row = trained_of(layer, use.features(every))
        return features

    # --- the backward pass -----------------------------------------------------------------------

    def _arrival(
        self, path: str, layout: Callable[[Tensor], Tensor], call: Call
    ) -> Callable[[Tensor], None]:
        """Return the hook that receives the gradient of a call's output."""
        arrive = self._backward.for_layers([path], Gathering._on_gradient, self, layout, call)
        call.hook = weakref.ref(arrive)
        return arrive

    def _on_gradient(
        self, layout: Callable[[Tensor], Tensor], call: Call, gradient: Tensor
    ) -> None:
        gradient = layout(gradient)
        rows = call.rows.take(gradient)
        precision = torch.finfo(gradient.dtype).eps
        of_layer = self._layers.rows[call.layer.path]
        of_layer.arrive(call, rows, norms(gradient).flatten(), precision)
        if call.every_row is not None:
            call.every_gradient = Rows(call.rows.shape).take(gradient)
        else:  # a second pass through one graph, whose rows are already summed up
            call.tells_sums = self._attainable and call.rows.total > 0

    def _expect(self, call: Call) -> None:
        """Register that a backward pass reached the recurrent call that contains this call."""
        rows = self._layers.rows.get(call.layer.path)
        if rows is not None:
            rows.expect(call)

    def _on_replay(self, call: Call, linear: Map, error: Tensor) -> None:
        """Take the rows that a replay computed for one layer of a recurrent call."""
        path = call.layer.path
        if path not in self._layers.rows:
            return
        try:
            if not call.known:
                of_rows = affine(linear.inputs, linear.use.weight, linear.use.bias)
                self._look(call, of_rows, linear.z)
            self._on_gradient(as_it_is, call, linear.gradient)
        except Exception as failure:
            self._layers.failed(path, failure)
        call.replay_error = error


def as_view(
    layout: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    gradient: Tensor,
) -> Tensor:
    """Return the gradient of a contiguous tensor in the layout of a view of its entries.

    It is copied only if its own memory order does not allow the view.
    """
    outermost_first = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    as_in_memory = gradient.reshape([shape[dim] for dim in outermost_first])
    return layout(as_in_memory.permute([outermost_first.index(dim) for dim in range(len(shape))]))


def reproduces(use: Use, features: Features, z: Tensor) -> Tensor:
    """Return ‖Θφ − z‖ / ‖z‖ on the rows, which is 0 up to rounding if the rule is right."""
    rest = z
    if use.weight is not None and (part := features.by_weight(use.shaped(use.weight))) is not None:
        rest = rest - part
    if use.bias is not None and (part := features.by_bias(use.bias)) is not None:
        rest = rest - part
    error: Tensor = torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(z)
    return error


def trained_of(layer: Layer, features: Features) -> Features:
    """Return the part of the features that belongs to the layer's trained parameters."""
    return features.restrict(weight=layer.weight is not None, bias=layer.bias is not None)
