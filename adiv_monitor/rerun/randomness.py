"""States of random number generators: saved, replayed and restored."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.rerun.kept import CONTAINERS, OF_TORCH

_MOST_ITEMS = 1_000  # larger containers are data
_DEPTH, _MOST = 5, 10_000  # of what holds or calls each other, and of what is looked at
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

# Functions that read and set the state of a generator.
Generator = tuple[Callable[[], Any], Callable[[Any], object]]


class Randomness:
    """The present states of random number generators, to rerun code that draws from them.

    Args:
        devices: the devices whose torch generators are saved.
        modules: None: save no other generators. Otherwise also save those of Python and numpy, and
            those that these modules hold, that their functions and hooks see, or that are global
            where their forward is written.
    """

    def __init__(
        self, devices: Iterable[torch.device], modules: Collection[nn.Module] | None = None
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
    before, restored = Randomness(devices, ()), False
    try:
        if replayed is not None:
            replayed.set()
        yield
        before.set()
        restored = True
    finally:  # if the block raised, or an interrupt hit the first call
        if not restored:
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
    """Yield the generators of Python, of numpy, and those that modules hold or see."""
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    for own in _seen_by(modules):
        if isinstance(own, torch.Generator):
            yield own.get_state, own.set_state
        elif isinstance(own, np.random.Generator):
            yield _of_numpy(own.bit_generator)
        elif isinstance(own, random.Random) and not isinstance(own, random.SystemRandom):
            yield own.getstate, own.setstate


def _seen_by(modules: Iterable[nn.Module]) -> Iterator[object]:
    """Yield what modules hold, their functions and hooks see, and what is global to them."""
    waiting: list[Any] = []
    kinds = set()
    for module in modules:
        own = tuple(vars(module).items())
        waiting += [x for name, x in own if name not in OF_TORCH or name in _HOOKS]
        kinds.add(type(module))
    for kind in kinds:
        of_class = [vars(part) for part in kind.__mro__ if part not in (nn.Module, object)]
        waiting += [x for names in of_class for x in tuple(names.values())]
        code = next((names["forward"] for names in of_class if "forward" in names), None)
        yield from tuple(getattr(code, "__globals__", {}).values())  # other threads may set some
    seen: set[int] = set()
    for _ in range(_DEPTH):
        waiting = [x for x in {id(x): x for x in waiting}.values() if id(x) not in seen]
        seen.update(map(id, waiting))
        yield from waiting
        waiting = list(islice((x for value in waiting for x in _inside(value)), _MOST))


def _inside(value: Any) -> Collection[Any]:
    """Return what a container, a plain object, a `partial` or a function holds or sees."""
    if isinstance(value, tuple) or type(value) in CONTAINERS:
        held = value.values() if isinstance(value, dict) else value
        return tuple(held) if len(held) <= _MOST_ITEMS else ()
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return value.__self__, getattr(value, "__func__", None)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, FunctionType):
        return () if _is_librarys(value) else [*_seen_by_function(value)]
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or isinstance(value, (Tensor, nn.Module, ModuleType)):
        return ()
    return () if _is_librarys(type(value)) else [*own.values(), *vars(type(value)).values()]


def _seen_by_function(function: FunctionType) -> Iterator[Any]:
    """Yield the defaults and the closure of a function, and the globals that it names."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # grows by the functions that are written inside
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        yield from [function.__globals__[x] for x in code.co_names if x in function.__globals__]


def _is_librarys(written: type | FunctionType) -> bool:
    """Return whether something is of torch or of the monitor: it draws from no other generator."""
    return str(written.__module__).partition(".")[0] in ("torch", "adiv_monitor")


def _of_numpy(bits: np.random.BitGenerator) -> Generator:
    return lambda: bits.state, lambda state: setattr(bits, "state", state)
