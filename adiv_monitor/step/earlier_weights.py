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
        self._points: list[Array] = []  # of each step the weights as it began, and as it left them

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
            self._of, self._points = keys, []
        shares = np.zeros(0)
        if len(self._points) > 1:
            points = np.concatenate(self._points)
            ways = np.linalg.norm(points[:, None] - points, axis=2)
            farthest = np.fmax.reduce(np.triu(ways), axis=1)
            has_moved = (farthest > 0) & (farthest < np.inf)
            shares = 1 - (np.linalg.norm(points - began, axis=1) / farthest)[has_moved]
            shares = shares[shares == shares]
        if len(self._points) == _STEPS:
            self._points = self._points[::2]
        self._points.append(np.stack([began] if stepped is None else [began, stepped]))
        return min(max(float(shares.max()), 0.0), 1.0) if shares.size else None


def chosen(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few parameters, evenly spread over the network, all on one device."""
    alike = [p for p in parameters if p.device == parameters[0].device]
    count = min(_PARAMETERS, len(alike))
    return [p for i in range(count) if part_of(p := alike[i * len(alike) // count]).numel()]


def sampled(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a copy of a few entries of each of these parameters, always the same."""
    return torch.cat([_few(part_of(p)) for p in parameters])


def _few(tensor: Tensor) -> Tensor:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).reshape(-1)  # in the order of memory, so that nothing is copied
    return flat[:: -(-len(flat) // _ENTRIES)]
