"""An ensemble's step as a CUDA graph: its many small operations are launched at once."""

from collections.abc import Mapping

import torch
from ensemble import Ensemble
from methods import Columns
from torch import Tensor

Batch = Mapping[int, Tensor]  # per seed


def is_settled(ensemble: Ensemble) -> bool:
    """Whether steps no longer differ by their number, as they do while a running mean is young."""
    return ensemble.step_number > 1 / Columns.FORGETTING


class Graph:
    """The step of an ensemble on batches of one size.

    Args:
        ensemble: whose steps are settled; the capture trains nothing.
        images: per seed, a batch as all later ones.
        labels: per seed.
    """

    def __init__(self, ensemble: Ensemble, images: Batch, labels: Batch) -> None:
        self.ensemble = ensemble
        self._images = {seed: rows.clone() for seed, rows in images.items()}
        self._labels = {seed: rows.clone() for seed, rows in labels.items()}
        self._device = next(iter(self._images.values())).device
        number = ensemble.step_number
        with torch.cuda.device(self._device):
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                ensemble.step(self._images, self._labels)
        ensemble.step_number = number

    def fits(self, images: Batch) -> bool:
        """Whether a batch has the size that was captured."""
        return all(self._images[seed].shape == rows.shape for seed, rows in images.items())

    def step(self, images: Batch, labels: Batch) -> None:
        """One step of every network."""
        for seed, rows in images.items():
            self._images[seed].copy_(rows)
            self._labels[seed].copy_(labels[seed])
        with torch.cuda.device(self._device):
            self._graph.replay()
        self.ensemble.step_number += 1
