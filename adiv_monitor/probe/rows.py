"""Takes rows of z of known layers while the probe runs; at θ before the step also Φ and G."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.catch import at_gradient
from adiv_monitor.capture.forwards import FunctionToCall
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.sampling import winners
from adiv_monitor.capture.second_pass import SecondPass
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.features.features import Features
from adiv_monitor.features.functions.linear import affine
from adiv_monitor.features.recurrent import RecurrentCall, Returned, maps_of, unroll, uses_of
from adiv_monitor.features.rows import Index, Rows, joined, to_device
from adiv_monitor.features.uses import Use
from adiv_monitor.probe.attention import Attentions

Gradients = Sequence[Tensor | None]


@dataclass(eq=False)
class _Call:
    """A call of a layer, with its chosen rows; features and G at θ before the step alone."""

    rows: Rows
    z: Tensor
    features: Features | None = None
    G: Tensor | None = None

    def arrive(self, gradient: Tensor | None) -> None:
        """Take the rows of a gradient."""
        self.G = None if gradient is None else self.rows.take(gradient)

    def pick(self, kept: Index | None) -> None:
        """Keep these rows alone; None: all."""
        if kept is not None and self.features is not None:
            index, rows = to_device(kept, self.z.device), self.rows
            chosen = kept if rows.chosen is None else rows.chosen[kept]
            self.rows = Rows(rows.shape, chosen, rows.device)
            self.features, self.z = self.features.pick(index), self.z.index_select(0, index)
            self.G = None if self.G is None else self.G.index_select(0, index)


class LayerOnProbe:
    """The rows of one layer at θ before the step: at most `max_rows`, each equally likely.

    Attributes:
        features: Φ of the chosen rows of all calls.
        z: the outputs.
        G: ∂L/∂z, NaN where it is not known.
        total: number of all rows.
        rows: the chosen rows of each call.
        d: the move of the optimizer's step, as a descent direction.
    """

    def __init__(self, calls: Sequence[_Call], max_rows: int | None) -> None:
        for call, kept in zip(calls, winners([c.rows for c in calls], max_rows), strict=True):
            call.pick(kept)
        first, *more = [call.features for call in calls if call.features is not None]
        self.features = first.joined(more)
        self.z = joined([call.z for call in calls])
        unknown = torch.nan if all(call.G is None for call in calls) else 0.0
        self.G = joined([torch.full_like(c.z, unknown) if c.G is None else c.G for c in calls])
        self.total = sum(call.rows.total for call in calls)
        self.rows = [call.rows for call in calls]
        self.d: Tensor | None = None


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

    def ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Handle the end of a module's forward."""
        if self.attentions is not None:
            self.attentions.ends(self._forwards.forward, args, kwargs)
        super().ends(module, args, kwargs, output)

    def called(self, call: FunctionToCall) -> Any:
        """Call a torch function."""
        if self.attentions is not None and self._is_looking():
            self.attentions.look(call, self._forwards)
        return super().called(call)


class ProbeRows(SecondPass):
    """Finds the layers of a captured step in one run of the probe. See `Takes`.

    Args:
        model: the model.
        first: the capture of the step.
        choose: (shape of all rows, device) → some of them; None: the rows are known, or none is
            wanted.
        known: the rows of each layer's calls in an earlier run.
        attentions: what looks for attention; None: nothing does.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Capture,
        choose: Callable[[tuple[int, ...], torch.device], Rows] | None,
        known: Mapping[str, Sequence[Rows]],
        attentions: Attentions | None = None,
    ) -> None:
        super().__init__(model, first.selection, first.pieces, _KnownLayers, _Looking)
        self.layers.found = first.layers.found
        assert isinstance(self.watching, _Looking)
        self._attentions = self.watching.attentions = attentions
        if attentions is not None:
            attentions.ask = self.ask
        self._choose, self._known = choose, known
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        # What leads to G: gradients of these go to a function that takes their rows.
        self._asked: list[tuple[list[GradientEdge], Callable[[Gradients], None]]] = []

    def differentiate(self, loss: Tensor) -> None:
        """Take G of the rows: the gradient of a loss. The graph stays for attentions."""
        edges = [edge for several, _ in self._asked for edge in several]
        if edges and loss.requires_grad:
            keeps = self._attentions is not None
            found = iter(torch.autograd.grad(loss, edges, retain_graph=keeps, allow_unused=True))
            with torch.no_grad():
                for several, take in self._asked:
                    take([next(found) for _ in several])

    def of_layers(self, max_rows: int | None) -> dict[str, LayerOnProbe]:
        """Return the rows of all layers that were called."""
        seen = {path: calls for path, calls in self._calls.items() if calls}
        return {path: LayerOnProbe(calls, max_rows) for path, calls in seen.items()}

    def z(self, path: str) -> Tensor | None:
        """Return the outputs of a known layer's rows; None: its calls are not those of before."""
        found = [call.z for call in self._calls[path]]
        return joined(found) if len(found) == len(self._known[path]) else None

    def use(self, use: Use, output: Tensor, known: Layer | str | None = None) -> None:
        """Take the rows of a use."""
        layer = self.layers.of(use, known)
        if layer is not None:
            viewed, layout = at_gradient(output, use.layout)
            call = self._take(layer, use.layout(output), use.features)
            self._ask([viewed], call, lambda g: None if g[0] is None else layout(g[0]))

    def maps(self, made: RecurrentCall, outputs: tuple[Tensor, ...], *_: Any) -> list[Tensor]:
        """Take the rows of the maps in a recurrent call."""
        if made.draws:  # in a function of the user's own; modules have no dropout here
            return []
        maps, calls = maps_of(made, outputs[0].dtype), dict[str, _Call | None]()
        for use in uses_of(made):
            layer = self.layers.of(use)
            if layer is not None and use.weight is not None:
                x, z = maps[use.part]
                features = affine(x, use.weight, use.bias).features
                calls[use.part] = self._take(layer, z, features)
        returned = Returned.of(made, outputs)

        def arrive(gradients: Gradients) -> None:
            for found in unroll(made, returned, gradients)[0]:
                if (call := calls.get(found.use.part)) is not None:
                    call.arrive(found.gradient)

        if any(calls.values()):
            self.ask(outputs, arrive)
        return []

    def _take(self, layer: Layer, z: Tensor, features: Callable[[Rows], Features]) -> _Call | None:
        """Take rows of z; also return the call in a run that chooses rows."""
        shape, z, calls = tuple(z.shape[:-1]), z.detach(), self._calls[layer.path]
        if self._choose is not None:
            rows = self._choose(shape, z.device)
            calls.append(_Call(rows, rows.take(z), features(rows).restrict(**layer.trained)))
            return calls[-1]
        expected = self._known.get(layer.path, ())[len(calls) :][:1]
        calls += [_Call(rows, rows.take(z)) for rows in expected if rows.shape == shape]
        return None

    def _ask(
        self,
        tensors: Sequence[Tensor],
        call: _Call | None,
        of: Callable[[Gradients], Tensor | None],
    ) -> None:
        if call is not None:
            self.ask(tensors, lambda gradients: call.arrive(of(gradients)))

    def ask(self, tensors: Sequence[Tensor], take: Callable[[Gradients], None]) -> None:
        """Let a function take the gradients of tensors, if the loss is known."""
        if all(x.requires_grad for x in tensors):
            self._asked.append(([get_gradient_edge(x) for x in tensors], take))
