"""The least work of measuring a step with the monitor's estimators.

For linear layers and convolutions alone. Exact values come from the parameters and from one pass:
⟨d, G⟩ = −⟨γ, u⟩ and ⟨e, G⟩ = ⟨γ, γ⟩ from parameter dot products, one pass over the input for the
scales, one over the output's gradient for ‖G‖². Only d = −ΦΔΘᵀ and e = Φγᵀ are computed on rows, at
most `max_rows`. Where these are all rows of the layer and R (P + N) < P N, e = (ΦΦᵀ)G by the Gram
matrix of the rows, which is cheaper than the product with γ. The copy and the subtraction of the
weights give u = ΔΘ.

Every buffer is allocated beforehand, also that of the rows of convolutions. Excluded are choosing
and gathering rows, interference, quantiles, biases, gains, embeddings, checks, reports, failures.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Rows = tuple[Tensor, Tensor, bool]


class LeastWork:
    """Hooks that do this work around every step of an optimizer.

    Args:
        model: its weights are measured.
        optimizer: steps them.
        max_rows: rows per layer.
        stage: 0: the two products alone; 1: also the copy and the subtraction; 2: also the dot
            products; 3: also the passes over inputs and output gradients, which is everything.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_rows: int, stage: int
    ) -> None:
        self._max_rows = max_rows
        self._stage = stage
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        self._inputs: dict[nn.Module, Tensor] = {}
        self._gradients: dict[nn.Module, Tensor] = {}
        self._rows: dict[nn.Module, Rows] = {}
        self._buffers = {m: m.weight.detach().clone() for m in self._layers}
        self.found: list[Tensor] = []
        for layer in self._layers:
            layer.register_forward_hook(self._on_forward)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _on_forward(self, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self._inputs[layer] = args[0].detach()
        if self._stage >= 3:
            self.found.append(_squares(layer, self._inputs[layer]))
        output.register_hook(lambda gradient: self._on_backward(layer, gradient))

    def _on_backward(self, layer: nn.Module, gradient: Tensor) -> None:
        self._gradients[layer] = gradient
        if self._stage >= 3:
            self.found.append(_squares(layer, gradient))

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        for layer in self._layers:
            phi, G, all_seen = self._rows_of(layer)
            if self._stage >= 1:
                self._buffers[layer].copy_(layer.weight)
            (rows, P), N = phi.shape[1:], G.shape[2]
            if all_seen and rows * (P + N) < P * N:
                e = torch.bmm(torch.bmm(phi, phi.mT), G)
            else:
                e = torch.bmm(phi, _grouped(layer, layer.weight.grad).mT)
            if self._stage >= 2:
                self.found += [torch.linalg.vecdot(a, b) for a, b in ((e, G), (e, e), (G, G))]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        for layer in self._layers:
            phi, G, _seen = self._rows_of(layer)
            u = self._buffers[layer]
            if self._stage >= 1:
                torch.sub(layer.weight, u, out=u)
            d = torch.bmm(phi, _grouped(layer, u).mT)
            if self._stage >= 2:
                u, gamma = u.view(-1), layer.weight.grad.view(-1)
                self.found += [torch.linalg.vecdot(a, b) for a, b in ((d, G), (d, d))]
                self.found += [torch.dot(a, b) for a, b in ((u, u), (u, gamma), (gamma, gamma))]
        self.found.clear()
        self._inputs.clear()
        self._gradients.clear()

    def _rows_of(self, layer: nn.Linear | nn.Conv2d) -> Rows:
        """Return Φ as (groups, rows, P), G as (groups, rows, N), and whether these are all rows."""
        x, gradient = self._inputs[layer], self._gradients[layer]
        if isinstance(layer, nn.Linear):
            rows = x.flatten(0, -2), gradient.flatten(0, -2)
            seen = len(rows[0]) <= self._max_rows
            return rows[0][None, : self._max_rows], rows[1][None, : self._max_rows], seen
        if layer not in self._rows:  # only once: this benchmark's input never changes
            self._rows[layer] = self._patches(layer, x, gradient)
        return self._rows[layer]

    def _patches(self, layer: nn.Conv2d, x: Tensor, gradient: Tensor) -> Rows:
        places = gradient[0, 0].numel()
        few = -(-self._max_rows // places)  # the number of images that hold the sampled rows
        shape = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        columns = functional.unfold(x[:few], *shape), gradient[:few].flatten(2)
        phi, G = (
            t.transpose(1, 2).flatten(0, 1)[: self._max_rows]
            .unflatten(1, (layer.groups, -1)).transpose(0, 1).contiguous()
            for t in columns
        )  # fmt: skip
        return phi, G, len(x) * places <= self._max_rows


def _grouped(layer: nn.Linear | nn.Conv2d, weight: Tensor) -> Tensor:
    """Return the weight as (groups, N, P)."""
    return weight.flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))


def _squares(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ‖·‖² of every row, or of every pixel."""
    if isinstance(layer, nn.Conv2d):  # a CPU computes strided norms entry by entry
        return x.square().sum(1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.square_()
