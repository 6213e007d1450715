"""A fork's loss of a batch once more, as if it had not been computed."""

from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, devices_of, untouched


class RepeatedLoss:
    """Computes a fork's loss by the same chance, and leaves random numbers and buffers alone.

    The same functions run as in training, but no gradient is taken. Monitors do not see it. What
    the random numbers and buffers are now is what it begins with.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        own = fork.loss.modules() if isinstance(fork.loss, nn.Module) else ()
        self._modules = list(dict.fromkeys((*fork.model.modules(), *own)))
        self._devices = devices_of(self._modules)
        random = Randomness({torch.device("cpu"), *self._devices}, self._modules)
        self._begin = Surroundings(random, self._modules)

    def of(self, batch: Any) -> float:
        """The loss of a batch, with the weights that the model has now."""

        def run() -> float:
            with self._begin.again():
                return float(self._fork.loss(self._fork.model, copied(batch)).detach())

        return untouched(self._modules, self._devices, run)
