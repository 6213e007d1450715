"""States of random number generators: saved, replayed and restored."""

import random
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


class Randomness:
    """The present states of random number generators, to rerun code that draws from them.

    Args:
        devices: the devices whose torch generators are saved.
        others: also save the global generators of Python and numpy.
    """

    def __init__(self, devices: Iterable[torch.device], *, others: bool = False) -> None:
        self._states = {device: _state(device) for device in devices}
        self._others = (random.getstate(), np.random.get_state()) if others else None

    @property
    def devices(self) -> Collection[torch.device]:
        """The devices whose torch generators are saved."""
        return self._states.keys()

    def set(self) -> None:
        """Set the generators to the saved states."""
        for device, state in self._states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])


def checksum(device: torch.device) -> int:
    """Return a checksum of the present state of torch's generator of a device."""
    return zlib.crc32(_state(device).numpy().tobytes())


@contextmanager
def restored_after(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore torch's generators of these devices, Python's and numpy's at the end of a block."""
    before = Randomness(devices, others=True)
    try:
        yield
    finally:
        before.set()


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
