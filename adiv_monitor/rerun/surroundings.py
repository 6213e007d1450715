"""Runs modules again in place: other parameters for a while, and no trace afterwards."""

import copy
import random
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize

from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.thread import apart

T = TypeVar("T")
# The attributes and the buffers of modules, each with values by name.
State = list[tuple[dict[str, Any], dict[str, Any]]]
# Larger tensors in attributes are data; larger frozen parameters are those of pretrained models.
_MOST_ENTRIES, _MOST_FROZEN = 2**24, 2**22
_GENERATORS = random.Random, np.random.Generator, np.random.RandomState


class Randomness:
    """The present states of random number generators, to rerun code that draws from them.

    Args:
        devices: the devices whose torch generators are saved.
        others: also save the global generators of Python and numpy.

    Attributes:
        devices: these devices.
    """

    def __init__(self, devices: Iterable[torch.device], *, others: bool = False) -> None:
        self._states = {device: _state(device) for device in devices}
        self.devices = self._states.keys()
        self._others = (random.getstate(), np.random.get_state()) if others else None

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


class Surroundings:
    """The present state that a call depends on besides its inputs and parameters.

    This is the state of random number generators, autocast, and the buffers and attributes of
    modules.

    Args:
        random: saved states of the generators.
        modules: the modules whose buffers and attributes are saved.

    Attributes:
        random: these states.
    """

    def __init__(self, random: Randomness, modules: Iterable[nn.Module] = ()) -> None:
        self.random = random
        self._state = _copied(_state_of(modules))
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(device.type for device in random.devices)})
            if torch.amp.is_autocast_available(kind)
        ]

    @property
    def cast_to(self) -> set[torch.dtype]:
        """The dtypes that autocast casts to, where it is enabled."""
        return {dtype for _, dtype, enabled in self._autocast if enabled}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the saved state within the context; only `untouched` restores it afterwards."""
        self.random.set()
        _set(_copied(self._state))
        with ExitStack() as contexts:
            for kind, dtype, enabled in self._autocast:
                contexts.enter_context(
                    # A cache would keep casts of weights that are not the run's.
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                )
            yield


def _state_of(modules: Iterable[nn.Module]) -> State:
    """Return the present attributes and buffers. Those of scripted modules are not accessible."""
    plain = (m for m in modules if not isinstance(m, torch.jit.ScriptModule))
    return [(held, dict(held)) for m in plain for held in (vars(m), m._buffers)]


def _copied(state: State) -> State:
    """Return the state with copies of what a forward pass may write to: tensors and generators."""
    copies: dict[int, Any] = {}

    def of(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = _copy(value)
        return copies[id(value)]

    return [(held, {name: of(x) for name, x in values.items()}) for held, values in state]


def _copy(value: Any) -> Any:
    """Return a copy of a generator, or of a plain tensor that is not trained; else the value."""
    if type(value) is Tensor:
        is_state = not value.requires_grad and value.layout is torch.strided
        return value.detach().clone() if is_state and value.numel() <= _MOST_ENTRIES else value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.deepcopy(value) if type(value) in _GENERATORS else value


def _set(state: State) -> None:
    for held, values in state:
        for name in held.keys() - values.keys():
            del held[name]
        held.update(values)


def untouched(
    modules: Collection[nn.Module],
    surroundings: Surroundings,
    run: Callable[[], T],
    parameters: Mapping[nn.Parameter, Tensor] | None = None,
) -> T:
    """Call a function that runs modules in place, and restore all state afterwards.

    Restored are parameters, buffers, attributes, random numbers and modes. The function runs in
    the given surroundings, with gradients enabled.

    Args:
        modules: the modules that run.
        surroundings: the state with which it begins.
        run: the function.
        parameters: values of trained parameters; None: the present ones. What the modules write to
            them is lost.

    Returns:
        The function's result.
    """
    random = Randomness({torch.device("cpu"), *surroundings.random.devices}, others=True)
    own = _state_of(modules)
    given = {**_copies(modules, frozen=parameters is not None), **(parameters or {})}
    data = {parameter: parameter.data for parameter in given}
    with ExitStack() as stack:
        stack.callback(setattr, _rerun, "depth", _rerun.depth)
        stack.enter_context(apart(functions=True))
        for name, value in (("_cache_enabled", 0), ("_cache", {})):
            stack.callback(setattr, parametrize, name, getattr(parametrize, name))
            setattr(parametrize, name, value)
        stack.callback(random.set)
        stack.callback(_set, own)
        stack.callback(_set_data, data)
        _rerun.depth += 1
        for context in (forced_eager(), torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(context)
        # The graph of a running forward pass may have saved them: no write to a copy counts there.
        stack.enter_context(_unsafe_preserve_version_counter(tuple(given)))
        _set(_copied(own))
        _set_data(given)
        stack.enter_context(surroundings.again())
        return run()


def _copies(modules: Iterable[nn.Module], *, frozen: bool) -> dict[nn.Parameter, Tensor]:
    """Return copies of the parameters, or of the frozen ones, to which a forward pass may write.

    Some clamp or normalise their weights, and some hold the average of a teacher, or a codebook.
    """
    every = {p for m in modules for p in m._parameters.values() if p is not None and is_plain(p)}
    some = (p for p in every if p.is_floating_point() and not (frozen and p.requires_grad))
    return {p: p.detach().clone() for p in some if p.requires_grad or p.numel() <= _MOST_FROZEN}


def _set_data(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.data = value


class _Rerun(threading.local):
    """Number of the reruns in which a thread is, one within another; none is a training step."""

    depth = 0


_rerun = _Rerun()


def reruns() -> int:
    """Return how many reruns of earlier calls this thread is in, one within another."""
    return _rerun.depth


def devices_of(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the devices on which the modules may draw random numbers: host and their tensors'."""
    held = {x.device for m in modules for x in (*m.parameters(), *m.buffers())}
    return {torch.device("cpu"), *(device for device in held if device.type != "meta")}


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's data is a plain `Tensor`, and the tensor is not lazy."""
    return type(tensor.data) is Tensor and not nn.parameter.is_lazy(tensor)


def version(tensor: Tensor) -> int:
    """Return a number that grows with every write into the tensor; −1 for inference tensors."""
    return -1 if tensor.is_inference() else tensor._version
