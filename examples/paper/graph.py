"""An ensemble's step as a CUDA graph: its small operations are fused, and launched at once."""

from collections.abc import Callable
from copy import deepcopy
from typing import cast

import torch
from ensemble import Ensemble, Part, Through
from methods import Columns
from torch import Tensor


def is_settled(ensemble: Ensemble) -> bool:
    """Whether steps no longer differ by their number, as they do while a running mean is young."""
    return ensemble.step_number > 1 / Columns.FORGETTING


def compiled(part: Part) -> Part:
    """The function, its operations fused for the sizes that it is first called with."""
    return cast("Part", torch.compile(part, dynamic=False))


class Graph:
    """The step of an ensemble on batches of one size.

    Args:
        ensemble: whose steps are settled; making the graph trains nothing.
        take: takes a step of it on images of these numbers, its small operations through a
            function.
        rows: numbers of images, as many as in all later batches.
    """

    def __init__(
        self, ensemble: Ensemble, take: Callable[[Tensor, Through], None], rows: Tensor
    ) -> None:
        self.ensemble = ensemble
        self._rows = rows.clone()
        torch.compiler.reset()  # other ensembles' sizes would make these compile for any size
        before = deepcopy(ensemble.state())
        with torch.cuda.device(rows.device):
            take(self._rows, compiled)  # in the capture nothing may compile
            ensemble.load(before)
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                take(self._rows, compiled)
        ensemble.step_number -= 1  # the capture trained nothing

    def step(self, rows: Tensor) -> None:
        """One step of every network."""
        self._rows.copy_(rows)
        with torch.cuda.device(self._rows.device):
            self._graph.replay()
        self.ensemble.step_number += 1
