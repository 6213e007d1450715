"""The random numbers that training draws: drawn again as they were, and as if nothing had been."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# How the state of a generator is read, and how it is set.
Generator = tuple[Callable[[], Any], Callable[[Any], object]]


class Randomness:
    """Where generators stand now, so that what draws from them can be run again.

    Args:
        devices: those whose generators of torch count.
        modules: None: no others count. Else Python's, numpy's and those that these modules hold.
    """

    def __init__(
        self, devices: Iterable[torch.device], modules: Collection[nn.Module] | None = None
    ) -> None:
        self._states = {device: _state(device) for device in devices}
        self._others = [] if modules is None else [(put, get()) for get, put in _others(modules)]

    @property
    def devices(self) -> Collection[torch.device]:
        """Those whose generators of torch count."""
        return self._states.keys()

    def now(self) -> "Randomness":
        """Where torch's generators of the same devices stand now."""
        return Randomness(self._states)

    def is_still(self, other: "Randomness") -> bool:
        """Whether nothing was drawn from torch's generators between the two."""
        return all(torch.equal(state, other._states[d]) for d, state in self._states.items())

    def set(self) -> None:
        """Let the generators go on from here; if that is interrupted, it can be done once more."""
        for device, state in self._states.items():
            _set_state(state, device)
        for put, state in self._others:
            put(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then; afterwards all generators, Python's and numpy's too, are as before."""
        before = Randomness(self._states, ())
        try:
            self.set()
            yield
            before.set()
        finally:  # again, where that was interrupted
            before.set()


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
    """Those of Python, of numpy, and of modules."""
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    for own in (x for module in modules for x in vars(module).values()):
        if isinstance(own, torch.Generator):
            yield own.get_state, own.set_state
        elif isinstance(own, np.random.Generator):
            yield _of_numpy(own.bit_generator)
        elif isinstance(own, random.Random):
            yield own.getstate, own.setstate


def _of_numpy(bits: np.random.BitGenerator) -> Generator:
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
