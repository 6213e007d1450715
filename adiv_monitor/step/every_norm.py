"""Norms of gradient and update of every step, which stay on their device until a report."""

from collections import deque

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.weights.pieces import gradient
from adiv_monitor.step.transfer import fetch_tensors

_MOST = 2**14  # steps whose norms are kept


class EveryNorm:
    """‖γ‖ and ‖ΔΘ‖ of every step, by the `_foreach` functions.

    Attributes:
        selection: the parameters; those of the step that is measured next, or was last.

    Raises:
        ValueError: parameters are sharded.
    """

    def __init__(self, selection: Selection) -> None:
        if selection.shards:
            raise ValueError(
                "Monitor(watch=…): got 'norms' for sharded parameters, expected 'loss' or None"
            )
        self.selection = selection
        self._found: deque[tuple[int, Tensor]] = deque(maxlen=_MOST)
        self._parameters: list[Tensor] = []
        self._before: list[Tensor] = []
        self._gradients: Tensor | None = None  # norms of the step that is being taken

    @torch.no_grad()
    def begins(self, optimizer: Optimizer) -> None:
        """Take the norm of the gradients, as the optimizer's step begins."""
        self._gradients, parameters = None, [*self.selection.parameters]
        if [*map(id, self._parameters)] != [*map(id, parameters)]:
            self._parameters = list[Tensor](parameters)
            self._before = [torch.empty_like(p) for p in parameters]
        torch._foreach_copy_(self._before, self._parameters)
        self._gradients = _norms([*map(gradient, parameters)])
        # A fused optimizer divides AMP gradients by the scale itself.
        if isinstance(scale := getattr(optimizer, "grad_scale", None), Tensor):
            self._gradients /= scale

    @torch.no_grad()
    def ends(self, step: int) -> None:
        """Take the norm of the updates, as the optimizer's step ends."""
        if self._gradients is not None:
            torch._foreach_sub_(self._before, self._parameters)
            each = torch.stack([self._gradients, _norms(self._before)])
            self._found.append((step, each.norm(dim=1)))
            self._gradients = None

    def take(self) -> tuple[dict[int, float], dict[int, float]]:
        """Remove and return the norms of gradients and of updates, by step."""
        of = [self._found.popleft() for _ in range(len(self._found))]
        norms = fetch_tensors([both for _, both in of])
        gradients, updates = (
            {s: float(x[i]) for (s, _), x in zip(of, norms, strict=True)} for i in range(2)
        )
        return gradients, updates


def _norms(tensors: list[Tensor]) -> Tensor:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
