"""The rows of the layers of a step on the probe; at θ before the step also Φ and G."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.catch import at_gradient
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.sampling import winners
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import joined
from adiv_monitor.features.uses import Use
from adiv_monitor.probe.attention import Attentions
from adiv_monitor.probe.recording import Recording


class RowsOfLayer:
    """The rows of one layer: at most `max_rows` of all calls, each equally likely.

    Attributes:
        shapes: shape of all rows of each call.
        total: number of all rows.
        z: the outputs of the chosen ones.
        features: their features.
        G: ∂L/∂z, NaN where it is not known.
        d: the move of the optimizer's step, as a descent direction.
    """

    def __init__(self, calls: Sequence[Call], max_rows: int | None) -> None:
        for call, kept in zip(calls, winners([c.rows for c in calls], max_rows), strict=True):
            if kept is not None:
                call.keep(kept)
        self.shapes = [call.rows.shape for call in calls]
        self.total = sum(call.rows.total for call in calls)
        self.z = joined([call.z for call in calls])
        first, *more = [call.features for call in calls]
        self.features: Features = first.joined(more)
        known = [call.gradient for call in calls]
        unknown = torch.nan if all(g is None for g in known) else 0.0
        pairs = zip(calls, known, strict=True)
        self.G = joined([torch.full_like(c.z, unknown) if g is None else g for c, g in pairs])
        self.d: Tensor | None = None


class ProbeRows(Recording):
    """Records the layers of a captured step in one run of the probe.

    Args:
        model: the model.
        first: the capture of the step.
        max_rows: number of rows to sample per layer; None: all.
        seed: the seed of the sample.
        attentions: what looks for attention; None: nothing does.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Capture,
        max_rows: int | None,
        seed: int,
        attentions: Attentions | None = None,
    ) -> None:
        super().__init__(model, first.selection, max_rows, seed)
        self._known = first.layers.found
        self.layers.found = dict(self._known)
        self._attentions = attentions
        if attentions is not None:
            self.watching.on_call, self.watching.on_end = attentions.look, attentions.ends
            attentions.ask = self.ask
        self._asked: list[tuple[GradientEdge, Callable[[Tensor], None]]] = []

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

    def of_layers(self) -> dict[str, RowsOfLayer]:
        """Return the rows of the step's layers that were called."""
        seen = {path: calls for path, calls in self.calls.items() if path in self._known}
        return {path: RowsOfLayer(calls, self._max_rows) for path, calls in seen.items()}

    def use(self, layer: Layer, use: Use, output: Tensor) -> None:
        """Take the rows of a use."""
        viewed, layout = at_gradient(output, use.layout)
        call = self.take(layer, use, use.layout(output))

        def arrive(gradient: Tensor) -> None:
            call.gradient = call.rows.take(layout(gradient))

        self.ask(viewed, arrive)

    def ask(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        """Let a function take the gradient of a tensor, if there is one."""
        if tensor.requires_grad:
            self._asked.append((get_gradient_edge(tensor), take))
