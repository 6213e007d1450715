"""The random numbers that training draws: what the monitor draws besides must not show in them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def restored_randomness(device: torch.device) -> Iterator[None]:
    """Afterwards random numbers go on as if nothing had been drawn, on the host and this device.

    On the host those of Python and numpy too.
    """
    states = random.getstate(), np.random.get_state()
    kept = {} if device.type == "cpu" else {"device_type": device.type}
    try:
        with torch.random.fork_rng(devices=[device] if kept else [], **kept):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
