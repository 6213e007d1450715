"""How much of the way that the weights went since an earlier measured step was undone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.weights.shards import part_of
from adiv_monitor.maths.sums import Array

# Of so many parameters so many entries each; and the number of earlier steps that are kept.
_PARAMETERS, _ENTRIES, _STEPS = 8, 32, 32


class EarlierWeights:
    """A few weights as earlier measured steps began, the older the fewer steps.

    A weight that comes back is seen in any sample of entries, so a small one suffices.
    """

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._thetas: Array = np.zeros((0, 0))
        self._farthest: Array = np.zeros(0)  # way from each of them since

    @np.errstate(all="ignore")  # weights may not be finite
    def returned(self, of: Sequence[Tensor], began: Array, stepped: Array | None) -> float | None:
        """Return max_i 1 − ‖θ − θ_i‖ / max_j ‖θ_j − θ_i‖ over earlier steps i < j, within [0, 1].

        The θ_j are the weights as measured steps between them began, and as these steps left them.

        Args:
            of: the parameters.
            began: θ, their sampled entries as this step began.
            stepped: the same after its update.

        Returns:
            The result; None if fewer than two earlier steps are known, or no weight moved.
        """
        keys = tuple(id(parameter) for parameter in of)
        if self._of != keys:
            self._of, self._thetas, self._farthest = keys, began[None][:0], np.zeros(0)
        has_moved = (self._farthest > 0) & (self._farthest < np.inf)
        shares = 1 - self._ways(began)[has_moved] / self._farthest[has_moved]
        shares = shares[shares == shares] if len(self._thetas) > 1 else shares[:0]
        if len(self._thetas) == _STEPS:
            self._thetas, self._farthest = self._thetas[::2], self._farthest[::2]
        self._thetas = np.concatenate([self._thetas, began[None]])
        self._farthest = np.append(self._farthest, 0.0)
        for way in (began,) if stepped is None else (began, stepped):
            self._farthest = np.fmax(self._farthest, self._ways(way))
        return min(max(float(shares.max()), 0.0), 1.0) if shares.size else None

    def _ways(self, theta: Array) -> Array:
        found: Array = np.linalg.norm(self._thetas - theta, axis=1)
        return found


def chosen(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few parameters, evenly spread over the network, all on one device."""
    alike = [p for p in parameters if p.device == parameters[0].device]
    count = min(_PARAMETERS, len(alike))
    return [p for i in range(count) if part_of(p := alike[i * len(alike) // count]).numel()]


def sampled(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a copy of a few entries of each of these parameters, always the same."""
    flat = (part_of(p).reshape(-1) for p in parameters)
    return torch.cat([of[:: -(-len(of) // _ENTRIES)] for of in flat])
