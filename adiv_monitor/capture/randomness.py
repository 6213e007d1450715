"""The generators that a forward pass may draw from, so that it can be repeated."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


class Randomness:
    """Where torch's generators stand now.

    Args:
        devices: other than the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host = torch.default_generator.get_state()
        self._states: dict[torch.device, Tensor] = {
            device: torch.get_device_module(device).get_rng_state(device) for device in devices
        }

    def now(self) -> "Randomness":
        """Where the same generators stand now."""
        return Randomness(self._states)

    def is_still(self, other: "Randomness") -> bool:
        """Whether nothing was drawn between the two."""
        return torch.equal(self._host, other._host) and all(
            torch.equal(state, other._states[device]) for device, state in self._states.items()
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then; afterwards all generators, Python's and numpy's too, are as before."""
        now, python, numpy = self.now(), random.getstate(), np.random.get_state()
        try:
            self._set()
            yield
        finally:
            now._set()
            random.setstate(python)
            np.random.set_state(numpy)

    def _set(self) -> None:
        torch.default_generator.set_state(self._host)
        for device, state in self._states.items():
            torch.get_device_module(device).set_rng_state(state, device)
