"""The least that measuring a step can cost while e and d are taken as matrix products.

For linear layers and convolutions alone: the products Φ(∂L/∂Θ)ᵀ and ΦΔΘᵀ on at most `max_rows`
rows, the copy and the subtraction that give ΔΘ, and the dot products that the cosines need. Every
buffer is made before, and the rows of convolutions too. Left out: gathering rows, scales,
interference, quantiles, biases, normalisers, all checks, reports and failures.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class LeastWork:
    """Does that work around every step of an optimizer.

    Args:
        model: its weights are looked at.
        optimizer: steps them.
        max_rows: of every layer.
        steps: 0: the two products alone; 1: also the copy and the subtraction; 2: everything.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_rows: int, steps: int
    ) -> None:
        self._max_rows = max_rows
        self._steps = steps
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        self._inputs: dict[nn.Module, Tensor] = {}
        self._gradients: dict[nn.Module, Tensor] = {}
        self._rows: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._buffers = {m: m.weight.detach().clone() for m in self._layers}
        self.dots: list[Tensor] = []
        for layer in self._layers:
            layer.register_forward_hook(self._on_forward)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _on_forward(self, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        self._inputs[layer] = args[0].detach()
        output.register_hook(lambda gradient: self._gradients.update({layer: gradient}))

    def _rows_of(self, layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor]:
        x, gradient = self._inputs[layer], self._gradients[layer]
        if isinstance(layer, nn.Linear):
            return x[: self._max_rows], gradient[: self._max_rows]
        if layer not in self._rows:  # once: always the same input in this benchmark
            shape = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            columns = functional.unfold(x, *shape), gradient.flatten(2)
            rows = (t.transpose(1, 2).flatten(0, 1)[: self._max_rows] for t in columns)
            self._rows[layer] = tuple(t.contiguous() for t in rows)
        return self._rows[layer]

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        self.dots.clear()
        for layer in self._layers:
            phi, G = self._rows_of(layer)
            if self._steps >= 1:
                self._buffers[layer].copy_(layer.weight)
            e = phi @ layer.weight.grad.flatten(1).t()
            if self._steps >= 2:
                self.dots += [(a * b).sum(1) for a, b in ((e, G), (e, e), (G, G))]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        for layer in self._layers:
            phi, G = self._rows_of(layer)
            u = self._buffers[layer]
            if self._steps >= 1:
                torch.sub(layer.weight, u, out=u)
            d = phi @ u.flatten(1).t()
            if self._steps >= 2:
                u, gamma = u.view(-1), layer.weight.grad.view(-1)
                self.dots += [(a * b).sum(1) for a, b in ((d, G), (d, d))]
                self.dots += [torch.dot(a, b) for a, b in ((u, u), (u, gamma), (gamma, gamma))]
