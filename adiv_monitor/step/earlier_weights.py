"""How much of the way that the weights went since an earlier measured step was undone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.capture.entries import sampled_entries
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
        self._steps: list[tuple[Array, float]] = []  # with the farthest way from there since

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
            self._of, self._steps = keys, []
        shares = [
            1 - _distance(began, theta) / farthest
            for theta, farthest in self._steps
            if 0 < farthest < np.inf
        ]
        found = max((share for share in shares if share == share), default=None)
        is_known = len(self._steps) > 1 and found is not None
        if len(self._steps) == _STEPS:
            self._steps = self._steps[::2]
        self._steps.append((began.copy(), 0.0))  # without the transfer of which it is a part
        ways = [began] if stepped is None else [began, stepped]
        self._steps = [
            (theta, max(farthest, *(_distance(way, theta) for way in ways)))
            for theta, farthest in self._steps
        ]
        return min(max(found, 0.0), 1.0) if is_known and found is not None else None


def chosen(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few parameters, evenly spread over the network, all on one device."""
    filled = [p for p in parameters if part_of(p).numel()]
    alike = [p for p in filled if p.device == filled[0].device]
    count = min(_PARAMETERS, len(alike))
    return [alike[i * len(alike) // count] for i in range(count)]


def sampled(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a copy of a few entries of each of these parameters, always the same."""
    return torch.cat([_few(sampled_entries(part_of(p))) for p in parameters])


def _few(entries: Tensor) -> Tensor:
    return entries[..., :: -(-entries.numel() // _ENTRIES)].reshape(-1)


def _distance(one: Array, other: Array) -> float:
    return float(np.linalg.norm(one - other))
