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
from adiv_monitor.capture.check import of_gradient
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import on_gradient
from adiv_monitor.capture.late_rows import LateRows
from adiv_monitor.capture.layer_rows import Arrived, Call, LayerRows, versions
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import gradient as held
from adiv_monitor.capture.weights.shards import is_shard, part_of
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
from adiv_monitor.rerun.surroundings import version
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
        self._backward = BackwardHooks(layers)
        self._forwards = forwards
        self._without_rule = without_rule
        self._provenance = layers.provenance
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
            return None
        z = use.layout(part_of(output))
        rows_of_layer = self._layers.rows[layer.path]
        call = self._new_call(layer, tuple(z.shape[:-1]), output.device)
        features = self._look(call, use, z)
        if not checked and layer.path not in self._checked and len(call.z):
            rows_of_layer.linear = reproduces(use, features, call.z)
        rows_of_layer.add(call)
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
            if layer.path in self._layers.rows:
                calls[use.part] = self._new_call(layer, (made.rows,), made.input.device)
        if not calls:
            return used
        returned = Returned.of(made, outputs)
        late = LateRows(made, returned, random, calls, self._on_replay)
        for call in calls.values():
            call.precision = made.precision
            call.hook = weakref.ref(late)
            self._layers.rows[call.layer.path].add(call)
        paths = [call.layer.path for call in calls.values()]
        late.watch(outputs, used, partial(self._backward.for_layers, paths))
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
        call.look(features, taken, None)
        rows_of_layer.add(call)
        outputs.hook(tensors, self._arrival(layer.path, as_it_is, call), self._layers.context.guard)

    def _used_inside(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the parameters that layers used since the running forward began."""
        last = self._forwards.number
        inside = {p for x, number in self._used.items() if number >= last for p in x.parameters}
        return [p for p in parameters if p in inside]

    def _new_call(self, layer: Layer, shape: tuple[int, ...], device: torch.device) -> Call:
        return self._layers.new_call(layer, shape, device)

    def _look(self, call: Call, use: Use, z: Tensor) -> Features:
        """Gather the rows of a call and return their features, untrained ones included."""
        layer, features = call.layer, use.features(call.rows)
        has_scales = layer.weight is not None and layer.is_direct
        whole = use.whole() if has_scales else None
        if whole is not None and layer.bias is None:
            whole = whole.of_weight()
        check, products = self._layers.context.check, None
        if check is not None and call.rows.total:
            products = check.products(layer, use, features, call.rows)
        call.look(trained_of(layer, features), call.rows.take(z), whole, products)
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
        layer, task = call.layer, torch._C._current_graph_task_id()
        of_layer = self._layers.rows[layer.path]
        counts = self._backward.accumulates(layer.parameters[0])
        if of_layer.task != task:
            self._begins(of_layer, call, counts=counts)
        sums = None if call.products is None else call.products.contracted(gradient)
        found = Arrived(call.rows.take(gradient), norms(gradient).flatten(), sums, counts)
        call.precision = max(call.precision, torch.finfo(gradient.dtype).eps)
        of_layer.arrive(call, task, found)
        if counts and call.every_row is not None:
            of_layer.add_to_ceiling(call, task, Rows(call.rows.shape).take(gradient))

    def _begins(self, rows: LayerRows, call: Call, *, counts: bool) -> None:
        """Begin a backward pass at a layer: what earlier passes left may have been zeroed."""
        layer, passes = call.layer, self._layers.context.passes
        lead, tasks = layer.parameters[0], rows.tasks
        rows.task = torch._C._current_graph_task_id()
        rows.at[rows.task] = version(lead), passes.steps()
        rows.versions = versions(layer)
        if lead.grad is None and not self._waits(lead):
            rows.zeroed([task for task, counted in tasks.items() if counted], passes, id(lead))
            rows.forget(tasks)
            rows.earlier = None
        elif counts and not any(tasks.values()) and call.products is not None:
            rows.earlier = self._earlier(call)
        if counts:
            passes.accumulates(rows.task)

    def _waits(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient of earlier passes has not reached a sharded parameter yet."""
        stand_in = self._provenance.stand_in(parameter)
        if stand_in is None:
            return False
        return stand_in.grad is not None or self._provenance.waiting(parameter)()

    def _earlier(self, call: Call) -> Tensor | None:
        """Return γv of the gradient that is there before the layer's first pass."""
        layer = call.layer
        if any(map(is_shard, layer.parameters)) or call.products is None:
            return None
        parts = {piece.key: piece.own(held(piece.parameter)) for piece in layer.pieces}
        return of_gradient(call.features, *layer.change(parts), call.products.v)

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
