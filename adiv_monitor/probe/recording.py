"""Records the layers of a model in a run of the probe: rows of their features, outputs and G."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adiv_monitor.capture.catch import at_gradient
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.layer_rows import Call, Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.sampling import draw, winners
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.watch import Watch
from adiv_monitor.capture.watching import Watching
from adiv_monitor.features.rows import joined
from adiv_monitor.features.uses import Refused, Use
from adiv_monitor.probe.attention import Attentions


class RowsOfLayer:
    """The rows of one layer: at most `max_rows` of all calls, each equally likely.

    Attributes:
        shapes: shape of all rows of each call.
        total: number of all rows.
        z: the outputs of the chosen ones.
        features: their features.
        G: ∂L/∂z, NaN where it is not known.
    """

    def __init__(self, calls: Sequence[Call], max_rows: int | None) -> None:
        for call, kept in zip(calls, winners([c.rows for c in calls], max_rows), strict=True):
            if kept is not None:
                call.keep(kept)
        self.shapes = [call.rows.shape for call in calls]
        self.total = sum(call.rows.total for call in calls)
        self.z = joined([call.z for call in calls])
        first, *more = [call.features for call in calls]
        self.features = first.joined(more)
        known = [call.gradient for call in calls]
        unknown = torch.nan if all(g is None for g in known) else 0.0
        pairs = zip(calls, known, strict=True)
        self.G = joined([torch.full_like(c.z, unknown) if g is None else g for c, g in pairs])


class Recording:
    """Context in which the calls of layers are recorded; exceptions are raised.

    Which rows are chosen depends on the seed, the layer's path and the number of its call alone, so
    that another run has the same ones.

    Args:
        model: the model.
        selection: the parameters.
        max_rows: number of rows to choose in each call; None: all.
        seed: the seed.
        attentions: what looks for attention; None: nothing does.

    Attributes:
        follows_all: see `Provenance`.
        layers: the layers.
        watching: what finds the uses.
        calls: the calls by path of the layer, in the order of the first ones.
        uses: by path, the use of the layer's weights in its first call.
    """

    follows_all = True

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        max_rows: int | None,
        seed: int,
        attentions: Attentions | None = None,
    ) -> None:
        guard = Guard()  # no training step runs that could be disturbed
        context = Context(guard, Chooser(None, np.random.default_rng(0)))
        self.layers = Layers(model, selection, context, follows_all=self.follows_all)
        self.watching = Watching(self.layers, self.use, self.maps)
        self._watch = Watch(self.watching, guard)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.uses: dict[str, Use] = {}
        self._max_rows, self._seed, self._attentions = max_rows, seed, attentions
        if attentions is not None:
            self.watching.on_call, self.watching.on_end = attentions.look, attentions.ends
            attentions.ask = self.ask
        self._asked: list[tuple[GradientEdge, Callable[[Tensor], None]]] = []

    def __enter__(self) -> None:
        self._watch.put_on()

    def __exit__(self, *error: object) -> None:
        self._watch.remove()

    def take(self, layer: Layer, use: Use, z: Tensor) -> Call:
        """Record a call of a layer whose output is z, (*rows, channels)."""
        key = self._seed, crc32(layer.path.encode()), len(self.calls.get(layer.path, ()))
        generator = np.random.default_rng(key)
        rows = draw(tuple(z.shape[:-1]), self._max_rows, generator, z.device)
        call = Call(layer, rows)
        call.z = rows.take(z.detach())
        call.features = use.features(rows).restrict(**layer.trained)
        self.uses.setdefault(layer.path, use)
        self.calls[layer.path].append(call)
        return call

    def use(self, layer: Layer, use: Use, output: Tensor) -> None:
        """Take a use, and the result of its function or of a module as a whole."""
        viewed, layout = at_gradient(output, use.layout)
        call = self.take(layer, use, use.layout(output))

        def arrive(gradient: Tensor) -> None:
            call.gradient = call.rows.take(layout(gradient))

        self.ask(viewed, arrive)

    def maps(self, *_: object) -> list[Tensor]:
        """Refuse a recurrent call: unrolling it anew in every run is not worth it."""
        raise Refused("recurrent layers are not measured on a probe")

    def ask(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        """Let a function take the gradient of a tensor, if there is one."""
        if tensor.requires_grad:
            self._asked.append((get_gradient_edge(tensor), take))

    def differentiate(self, loss: Tensor) -> None:
        """Take G of the rows: the gradient of a loss. The graph stays for attentions."""
        if self._asked and loss.requires_grad:
            edges, takes = zip(*self._asked, strict=True)
            keeps = self._attentions is not None
            found = torch.autograd.grad(loss, edges, retain_graph=keeps, allow_unused=True)
            with torch.no_grad():
                for gradient, take in zip(found, takes, strict=True):
                    if gradient is not None:
                        take(gradient)

    def of_layers(self, known: dict[str, Layer]) -> dict[str, RowsOfLayer]:
        """Return the rows of those known layers that were called."""
        seen = {path: calls for path, calls in self.calls.items() if path in known}
        return {path: RowsOfLayer(calls, self._max_rows) for path, calls in seen.items()}
