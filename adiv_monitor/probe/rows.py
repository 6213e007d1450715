"""Takes rows of z of known layers while the probe runs; at θ before the step also Φ and G."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forward, Forwards, FunctionToCall
from adiv_monitor.capture.gathering import as_view, trained_of
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.sampling import winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.outputs import Outputs
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule
from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.recurrent import RecurrentCall, Returned, maps_of, unroll, uses_of
from adiv_monitor.features.rows import Rows, behind_view, joined, to_device
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.probe.attention import Attentions
from adiv_monitor.probe.batch import Unknown
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.twin import Arguments

Gradients = Sequence[Tensor | None]


@dataclass(eq=False)
class _Call:
    """A call of a layer, with its chosen rows."""

    rows: Rows
    features: Features
    z: Tensor
    G: Tensor | None = None


@dataclass(eq=False)
class LayerOnProbe:
    """The rows of one layer at θ before the step.

    Attributes:
        features: Φ of the chosen rows of all calls.
        z: the outputs.
        G: ∂L/∂z; None: not known.
        total: number of all rows.
        rows: the chosen rows of each call.
        d: the move of the optimizer's step, as a descent direction.
    """

    features: Features
    z: Tensor
    G: Tensor | None
    total: int
    rows: list[Rows]
    d: Tensor | None = None

    @classmethod
    def of(cls, calls: Sequence[_Call], max_rows: int | None) -> "LayerOnProbe":
        """Join the calls, and keep at most `max_rows` rows, each with equal probability."""
        for call, kept in zip(calls, winners([c.rows for c in calls], max_rows), strict=True):
            if kept is not None:
                index, rows = to_device(kept, call.z.device), call.rows
                chosen = kept if rows.chosen is None else rows.chosen[kept]
                call.rows = Rows(rows.shape, chosen, rows.device)
                call.features, call.z = call.features.pick(index), call.z.index_select(0, index)
                call.G = None if call.G is None else call.G.index_select(0, index)
        known = [call.G for call in calls if call.G is not None]
        zeros = [torch.zeros_like(c.z) if c.G is None else c.G for c in calls] if known else []
        return cls(
            calls[0].features.joined([call.features for call in calls[1:]]),
            joined([call.z for call in calls]),
            joined(zeros) if known else None,
            sum(call.rows.total for call in calls),
            [call.rows for call in calls],
        )


class _KnownLayers(Layers):
    """The layers that were found in the step, without new ones."""

    def _new(self, path: str, use: Use, weight: Source | None, bias: Source | None) -> Layer | None:
        return None

    def failed(self, path: str, error: Exception) -> None:
        """Raise the error: the same code did not fail in the step."""
        raise error


class _Looking(Watching):
    """Watching that also looks for attention."""

    attentions: Attentions | None = None

    def begins(self, forward: Forward) -> None:
        """Record that a module's forward begins."""
        super().begins(forward)
        if self.attentions is not None:
            self.attentions.begins(forward)

    def called(self, call: FunctionToCall) -> Any:
        """Call a torch function."""
        if self.attentions is not None and self._is_looking():
            self.attentions.look(call, self._forwards)
        return super().called(call)


class ProbeRows:
    """Finds the layers of a captured step in one run of the probe. See `Takes`.

    Args:
        model: the model.
        first: the capture of the step.
        chooser: chooses the rows; None: the rows are those of `known`.
        known: the rows of each layer, from an earlier run.
        attentions: what looks for attention; None: nothing does.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Capture,
        chooser: Chooser | None,
        known: dict[str, LayerOnProbe],
        attentions: Attentions | None = None,
    ) -> None:
        selection, guard = first.selection, Guard()  # no training step runs that could be disturbed
        self._chooser = chooser
        self._known = known
        self._attentions = attentions
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._z: dict[str, list[Tensor]] = defaultdict(list)
        # What leads to G: gradients of these go to a function that takes their rows.
        self._asked: list[tuple[list[GradientEdge], Callable[[Gradients], None]]] = []
        self._provenance = Provenance(model, selection.parameters, first.pieces)
        self._forwards = Forwards.of(selection, guard, repeated=True)
        names = Names(model, selection, self._forwards)
        chosen = Chooser(None, np.random.default_rng(0))
        self._layers = _KnownLayers(names, self._provenance, chosen, Context(guard))
        self._layers.found = first.layers.found
        self._without_rule = ParametersWithoutRule(selection, guard)
        given = selection, self._forwards, self._layers, self._without_rule, self
        self._watching = _Looking(*given, repeated=True)
        self._watching.attentions = attentions

    def __enter__(self) -> "ProbeRows":
        self._provenance.start()  # with the buffers of this run
        self._forwards.watch(self._watching)
        return self

    def __exit__(self, *error: object) -> None:
        call_all(self._watching.detach, self._without_rule.release, self._forwards.remove)

    def differentiate(self, loss: Tensor) -> None:
        """Take G of the rows: the gradient of a loss."""
        edges = [edge for several, _ in self._asked for edge in several]
        if self._attentions is not None:
            edges += self._attentions.edges
        if not edges or not loss.requires_grad:
            return
        keeps = self._attentions is not None
        found = iter(torch.autograd.grad(loss, edges, retain_graph=keeps, allow_unused=True))
        with torch.no_grad():
            for several, take in self._asked:
                take([next(found) for _ in several])
            if self._attentions is not None:
                self._attentions.arrive([*found])

    def layers(self, max_rows: int | None) -> dict[str, LayerOnProbe]:
        """Return the rows of all layers that were called."""
        return {path: LayerOnProbe.of(calls, max_rows) for path, calls in self._calls.items()}

    def z(self, path: str) -> Tensor:
        """Return the outputs of a known layer's rows.

        Raises:
            Unknown: it was called otherwise than at first.
        """
        found, known = self._z[path], self._known[path].rows
        if [x.shape[0] for x in found] != [rows.count for rows in known]:
            raise Unknown("it has other calls or rows when the probe runs again")
        return joined(found)

    def use(
        self,
        use: Use,
        output: Tensor,
        known: Layer | str | None = None,
        *,
        checked: bool = True,
        inputs: object = None,
    ) -> None:
        """Take the rows of a use."""
        if self._attentions is not None:
            self._attentions.used(use, output, self._forwards)
        layer = self._layers.of(use, known)
        if layer is None:
            return
        z = use.layout(output)
        call = self._take(layer, z, lambda rows: trained_of(layer, use.features(rows)))
        if call is not None and output.requires_grad:
            viewed, layout = behind_view(output), use.layout
            if viewed is not output:
                layout = partial(as_view, layout, output.shape, output.stride())
            self._ask([viewed], lambda g: _arrive(call, None if g[0] is None else layout(g[0])))

    def maps(
        self,
        made: RecurrentCall,
        outputs: tuple[Tensor, ...],
        random: Randomness | None,
        inputs: object,
    ) -> list[Tensor]:
        """Take the rows of the maps in a recurrent call."""
        if made.refusal is not None:  # it was refused in the step, too
            return []
        maps = maps_of(made, outputs[0].dtype, random)
        calls: dict[str, _Call] = {}
        for use in uses_of(made):
            layer = self._layers.of(use)
            if layer is not None:
                assert use.weight is not None
                x, z = maps[use.part]
                of = partial(_features, layer, affine(x, use.weight, use.bias))
                call = self._take(layer, z, of)
                if call is not None:
                    calls[use.part] = call
        if calls and outputs[0].requires_grad:
            returned = Returned.of(made, outputs)

            def arrive(gradients: Gradients) -> None:
                for found in unroll(made, returned, gradients, random)[0]:
                    if found.use.part in calls:
                        _arrive(calls[found.use.part], found.gradient)

            self._ask(outputs, arrive)
        return []

    def whole(
        self,
        module: nn.Module,
        names: list[str],
        arguments: Arguments,
        outputs: Outputs,
        tensors: list[Tensor],
        inputs: object,
    ) -> None:
        """Take the rows of a module that is measured as a whole."""
        left = {module.get_parameter(name) for name in names}
        layers = (x for x in self._layers.found.values() if x.is_through(module))
        layer = next((x for x in layers if left.issubset(x.parameters)), None)
        if layer is None:
            return
        held = [n for n, p in module.named_parameters() if any(p is x for x in layer.parameters)]
        z, began = outputs.rows(tensors), self._forwards.forward

        def features(rows: Rows) -> Features:
            given = module, held, arguments, outputs, rows.take(z), began, rows
            return self._without_rule.features(*given)

        try:
            call = self._take(layer, z, features)
        except Refused:  # as random numbers that it draws itself
            return
        if call is not None:
            self._ask(tensors, lambda g: _arrive(call, outputs.gradient(g)))

    def _take(self, layer: Layer, z: Tensor, features: Callable[[Rows], Features]) -> _Call | None:
        """Take rows of z; also return the call in a run that chooses rows."""
        path, shape = layer.path, tuple(z.shape[:-1])
        if self._chooser is not None:
            calls = self._calls[path]
            chosen = partial(self._chooser.further, bound=np.inf) if calls else self._chooser.first
            rows = chosen(shape, z.device)
            call = _Call(rows, features(rows), rows.take(z.detach()))
            calls.append(call)
            return call
        known, found = self._known.get(path), self._z[path]
        if known is not None and len(found) < len(known.rows):
            rows = known.rows[len(found)]
            found.append(rows.take(z.detach()) if rows.shape == shape else z.new_empty(0, 1))
        return None

    def _ask(self, tensors: Sequence[Tensor], take: Callable[[Gradients], None]) -> None:
        reached = [x for x in tensors if x.requires_grad]
        if len(reached) == len(tensors):
            self._asked.append(([get_gradient_edge(x) for x in reached], take))


def _features(layer: Layer, use: Use, rows: Rows) -> Features:
    return trained_of(layer, use.features(rows))


def _arrive(call: Any, gradient: Tensor | None) -> None:
    if gradient is not None:
        call.G = call.rows.take(gradient)
