"""The random numbers that training draws: what the monitor draws besides must not show in them."""

from contextlib import AbstractContextManager

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
