"""What a forward pass depends on besides its inputs and parameters, so that it can be run again."""

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.capture.again.randomness import random_state, set_random_state
from adiv_monitor.capture.eager import forced_eager
from adiv_monitor.capture.guard import ThreadState, function_modes, set_function_modes
from adiv_monitor.capture.hook import replay

# Attributes that a forward pass may ask for, or count with; others may be large, or hold a graph.
_SETTING = (bool, int, float, str, NoneType)
T = TypeVar("T")
State = tuple[Callable[[], Any], Callable[[Any], object]]  # how to get it, and to put it back


class Buffers:
    """Copies of buffers: one of each for as long as it doesn't change."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy(self, buffer: Tensor) -> Tensor:
        """The buffer as it is now."""
        key = id(buffer), version(buffer)
        if key not in self._copies:
            self._copies[key] = buffer, buffer.detach().clone()
        return self._copies[key][1]


class Surroundings:
    """As they are now: random numbers, buffers, settings of modules, autocast, the default device.

    Args:
        modules: all that may run.
        devices: those on which random numbers may be drawn, besides the host.
        buffers: takes copies of theirs.
    """

    def __init__(
        self, modules: Collection[nn.Module], devices: Collection[torch.device], buffers: Buffers
    ) -> None:
        self._random = [(put, get()) for get, put in _generators(modules, devices)]
        self._settings = {
            module: {name: x for name, x in vars(module).items() if type(x) in _SETTING}
            for module in modules
        }
        self._buffers = {
            module: {
                name: buffers.copy(buffer)
                for name, buffer in module._buffers.items()
                if buffer is not None and is_plain(buffer)
            }
            for module in modules
        }
        types = {"cpu", *(device.type for device in devices)}
        self._autocast = {
            t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types
        }
        self._device = torch.get_default_device()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are as they were. Afterwards only `untouched` puts them back."""
        for put, state in self._random:
            put(state)
        stand_ins: dict[int, Tensor] = {}
        for module, settings in self._settings.items():
            vars(module).update(settings)
            for name, copy in self._buffers[module].items():
                module._buffers[name] = stand_ins.setdefault(id(copy), copy.clone())
        with ExitStack() as contexts:
            for device_type, (enabled, dtype) in self._autocast.items():
                contexts.enter_context(
                    # Its cache would keep what was made of weights that are not the run's.
                    torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)
                )
            if self._device.type != "cpu":
                contexts.enter_context(self._device)
            yield


def untouched(
    modules: Collection[nn.Module], devices: Collection[torch.device], run: Callable[[], T]
) -> T:
    """What a function gives that repeats forward passes; afterwards all is as if it had not run.

    That is: random numbers, buffers and attributes of the modules, modes; but not what is written
    into objects that attributes refer to.
    """
    random_now = [(put, get()) for get, put in _generators(modules, devices)]
    attributes = {module: dict(vars(module)) for module in modules}
    buffers = {module: dict(module._buffers) for module in modules}
    modes, cached, eager = function_modes(), parametrize._cache_enabled, forced_eager()
    thread = ThreadState(whole=True)

    def put_back() -> None:
        replay(False)
        eager.leave()
        parametrize._cache_enabled = cached
        set_function_modes(modes)
        thread.put_back()
        for module in modules:
            for name in vars(module).keys() - attributes[module].keys():
                del vars(module)[name]
            vars(module).update(attributes[module])
            module._buffers.clear()
            module._buffers.update(buffers[module])
        for put, state in random_now:
            put(state)

    try:
        set_function_modes(())
        parametrize._cache_enabled = 0
        replay(True)
        with eager, torch.inference_mode(False), torch.enable_grad():
            found = run()
        put_back()
        return found
    finally:  # again, where that was interrupted
        put_back()


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor that has its own numbers."""
    return type(tensor.data) is Tensor and not nn.parameter.is_lazy(tensor)


def version(tensor: Tensor) -> int:
    """Grows when something is written into the tensor."""
    return -1 if tensor.is_inference() else tensor._version


def _generators(modules: Collection[nn.Module], devices: Collection[torch.device]) -> list[State]:
    """Of all random numbers that a forward pass may draw."""
    found: list[State] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *(_of_device(device) for device in (torch.device("cpu"), *devices)),
    ]
    for own in (x for module in modules for x in vars(module).values()):
        if isinstance(own, torch.Generator):
            found.append((own.get_state, own.set_state))
        elif isinstance(own, np.random.Generator):
            found.append(_of_numpy(own.bit_generator))
        elif isinstance(own, random.Random):
            found.append((own.getstate, own.setstate))
    return found


def _of_device(device: torch.device) -> State:
    return lambda: random_state(device), lambda state: set_random_state(state, device)


def _of_numpy(bits: np.random.BitGenerator) -> State:
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
