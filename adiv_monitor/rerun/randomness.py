"""States of random number generators: saved, replayed and restored."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.rerun.thread import surely

# Functions that read and set the state of a generator.
Generator = tuple[Callable[[], Any], Callable[[Any], object]]


class Randomness:
    """The present states of random number generators, to rerun code that draws from them.

    Args:
        devices: the devices whose torch generators are saved.
        modules: None: save no other generators. Otherwise also save those of Python and numpy, and
            those that are attributes of these modules.
    """

    def __init__(
        self, devices: Iterable[torch.device], modules: Iterable[nn.Module] | None = None
    ) -> None:
        self._states = {device: _state(device) for device in devices}
        self._others = [] if modules is None else [(put, get()) for get, put in _others(modules)]

    @property
    def devices(self) -> Collection[torch.device]:
        """The devices whose torch generators are saved."""
        return self._states.keys()

    def now(self) -> "Randomness":
        """Save the present states of torch's generators of the same devices."""
        return Randomness(self._states)

    def is_still(self, other: "Randomness") -> bool:
        """Whether nothing was drawn from torch's generators between the two saved states."""
        return all(torch.equal(state, other._states[d]) for d, state in self._states.items())

    def set(self) -> None:
        """Set the generators to the saved states; after an interrupt, it can be called again."""
        for device, state in self._states.items():
            _set_state(state, device)
        for put, state in self._others:
            put(state)

    def again(self) -> AbstractContextManager[None]:
        """Replay the saved states in a context, and restore all generators after it."""
        return restored_after(self._states, self)


@contextmanager
def restored_after(
    devices: Iterable[torch.device], replayed: Randomness | None = None
) -> Iterator[None]:
    """Restore torch's generators of these devices, Python's and numpy's at the end of a block.

    Args:
        devices: the devices.
        replayed: the states with which the block begins; None: the present ones.
    """
    before = Randomness(devices, ())
    try:
        if replayed is not None:
            replayed.set()
        yield
    finally:
        surely(before.set)


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _others(modules: Iterable[nn.Module]) -> Iterator[Generator]:
    """Yield the generators of Python, of numpy, and those that modules hold."""
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    for own in {id(x): x for module in modules for x in vars(module).values()}.values():
        if isinstance(own, torch.Generator):
            yield own.get_state, own.set_state
        elif isinstance(own, np.random.Generator):
            yield _of_numpy(own.bit_generator)
        elif isinstance(own, random.Random) and not isinstance(own, random.SystemRandom):
            yield own.getstate, own.setstate


def _of_numpy(bits: np.random.BitGenerator) -> Generator:
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
