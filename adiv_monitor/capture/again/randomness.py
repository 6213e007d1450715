"""The random numbers that training draws: what the monitor draws besides must not show in them."""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the random numbers that a call on this device draws from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Go on from what `random_state` was."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def restored_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Afterwards random numbers go on as if nothing had been drawn, on the host and this device."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


class Randomness:
    """Where torch's generators stand now, so that a forward pass can be repeated.

    Args:
        devices: all that it may draw on.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._states = {device: random_state(device) for device in devices}

    def now(self) -> "Randomness":
        """Where the same generators stand now."""
        return Randomness(self._states)

    def is_still(self, other: "Randomness") -> bool:
        """Whether nothing was drawn between the two."""
        return all(torch.equal(state, other._states[d]) for d, state in self._states.items())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then; afterwards all generators, Python's and numpy's too, are as before."""
        now, python, numpy = self.now(), random.getstate(), np.random.get_state()

        def put_back() -> None:
            now._set()
            random.setstate(python)
            np.random.set_state(numpy)

        try:
            self._set()
            yield
            put_back()
        finally:  # again, where that was interrupted
            put_back()

    def _set(self) -> None:
        for device, state in self._states.items():
            set_random_state(state, device)
