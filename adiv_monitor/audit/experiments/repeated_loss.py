"""A second computation of a fork's loss that leaves no trace."""

from typing import Any

from torch import nn

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, devices_of, untouched


class RepeatedLoss:
    """Computes a fork's loss with fixed random numbers and restores random numbers and buffers.

    The same functions run as in training, but no gradient is taken and monitors do not observe it.
    The computation starts from the random numbers and buffers at the time of construction, or of
    the last `keep`.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        own = fork.loss.modules() if isinstance(fork.loss, nn.Module) else ()
        self._modules = list(dict.fromkeys((*fork.model.modules(), *own)))
        self._devices = devices_of(self._modules)
        self.keep()

    def keep(self) -> None:
        """Keep the present random numbers and buffers, from which the computation starts."""
        self._begin = Surroundings(Randomness(self._devices, self._modules), self._modules)

    def of(self, batch: Any) -> float:
        """Return the loss of a batch with the model's current weights."""

        def run() -> float:
            with self._begin.again():
                return float(self._fork.loss(self._fork.model, copied(batch)).detach())

        return untouched(self._modules, self._devices, run)
