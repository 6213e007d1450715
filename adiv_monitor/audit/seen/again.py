"""A fork's loss of a batch once more, as if it had not been computed."""

from typing import Any

from torch import nn

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.capture.again.surroundings import Buffers, Surroundings, untouched


class Again:
    """Computes a fork's loss by the same chance, and leaves random numbers and buffers alone.

    The same functions run as in training, but no gradient is taken. Monitors do not see it. What
    the random numbers and buffers are now is what it begins with.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        own = fork.loss.modules() if isinstance(fork.loss, nn.Module) else ()
        self._modules = list(dict.fromkeys((*fork.model.modules(), *own)))
        held = {x.device for m in self._modules for x in (*m.parameters(), *m.buffers())}
        self._devices = [device for device in held if device.type not in ("cpu", "meta")]
        self._begin = Surroundings(self._modules, self._devices, Buffers())

    def loss(self, batch: Any) -> float:
        """Of a batch, with the weights that the model has now."""

        def run() -> float:
            with self._begin.again():
                return float(self._fork.loss(self._fork.model, copied(batch)).detach())

        return untouched(self._modules, self._devices, run)
