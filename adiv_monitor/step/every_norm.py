"""Norms of gradient and update of every step, which stay on their device until a report."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.weights.pieces import gradient
from adiv_monitor.maths.sums import Array
from adiv_monitor.report import Spike
from adiv_monitor.step.transfer import fetch_tensors

_MOST, _EACH = 2**14, 128  # steps whose norms are kept: of the whole, and of each parameter
FASTER = 2.0  # times its usual update: the layers that a spike names


class EveryNorm:
    """‖γ‖ and ‖ΔΘ‖ of every step, as vectors (gradient, update) by the `_foreach` functions.

    Attributes:
        selection: the parameters; those of the step that is measured next, or was last.
        layers: the ids of the parameters of each layer that was measured last.

    Raises:
        ValueError: parameters are sharded.
    """

    def __init__(self, selection: Selection) -> None:
        if selection.shards:
            raise ValueError(
                "Monitor(watch=…): got 'norms' for sharded parameters, expected 'loss' or None"
            )
        self.selection = selection
        self.layers: Mapping[str, Sequence[int]] = {}
        self._whole: deque[tuple[int, Tensor]] = deque(maxlen=_MOST)
        self._each: deque[tuple[int, Tensor]] = deque(maxlen=_EACH)  # (2, parameters)
        self._parameters: list[Tensor] = []
        self._before: list[Tensor] = []
        self._gradients: Tensor | None = None  # of the step that is being taken

    @torch.no_grad()
    def begins(self, optimizer: Optimizer) -> None:
        """Take the norms of the gradients, as the optimizer's step begins."""
        self._gradients, parameters = None, [*self.selection.parameters]
        if [*map(id, self._parameters)] != [*map(id, parameters)]:
            self._parameters = list[Tensor](parameters)
            self._before = [torch.empty_like(p) for p in parameters]
            self._each.clear()
        torch._foreach_copy_(self._before, self._parameters)
        self._gradients = _norms([*map(gradient, parameters)])
        # A fused optimizer divides AMP gradients by the scale itself.
        if isinstance(scale := getattr(optimizer, "grad_scale", None), Tensor):
            self._gradients /= scale

    @torch.no_grad()
    def ends(self, step: int) -> None:
        """Take the norms of the updates, as the optimizer's step ends."""
        if self._gradients is not None:
            torch._foreach_sub_(self._before, self._parameters)
            each = torch.stack([self._gradients, _norms(self._before)])
            self._each.append((step, each))
            self._whole.append((step, each.norm(dim=1)))
            self._gradients = None

    def take(self) -> tuple[dict[int, float], dict[int, float]]:
        """Remove and return the norms of the whole, by step."""
        of = [self._whole.popleft() for _ in range(len(self._whole))]
        norms = fetch_tensors([both for _, both in of])
        gradients, updates = (
            {s: float(x[i]) for (s, _), x in zip(of, norms, strict=True)} for i in range(2)
        )
        return gradients, updates

    def known(self, spike: Spike) -> Spike:
        """Return a spike with the layers whose updates jumped in the two steps up to it, if any."""
        steps = np.array([step for step, _ in self._each])
        before, near = steps < spike.step - 1, (steps == spike.step - 1) | (steps == spike.step)
        if not before.any() or not near.any():
            return spike
        squares: Array = np.stack(fetch_tensors([norms for _, norms in self._each]))[:, 1] ** 2
        at = {id(p): i for i, p in enumerate(self._parameters)}
        found = {}
        for path, keys in self.layers.items():
            own = squares[:, [at[key] for key in keys if key in at]].sum(1)
            usual = float(np.median(own[before]))
            if usual > 0 and (times := math.sqrt(own[near].max() / usual)) > FASTER:
                found[path] = times
        return replace(
            spike, layers=dict(sorted(found.items(), key=lambda x: -x[1])) or spike.layers
        )


def _norms(tensors: list[Tensor]) -> Tensor:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
