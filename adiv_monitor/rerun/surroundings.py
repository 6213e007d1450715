"""What a call depends on besides inputs and parameters, and how it is run again unseen."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import ThreadState, function_modes, set_function_modes

# Attributes that a forward pass may ask for, or count with; others may be large, or hold a graph.
_SETTING = (bool, int, float, str, NoneType)
T = TypeVar("T")


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
    """What a call depends on besides its inputs and parameters, as it is now.

    Random numbers, autocast, the default device, whether kernels are to be deterministic; of
    modules their buffers and settings.

    Args:
        random: where the generators stood.
        modules: those whose buffers and settings count; a twin has its own.
        buffers: takes copies of theirs.
    """

    def __init__(
        self,
        random: Randomness,
        modules: Collection[nn.Module] = (),
        buffers: Buffers | None = None,
    ) -> None:
        self._random = random
        self._settings = {
            module: {name: x for name, x in vars(module).items() if type(x) in _SETTING}
            for module in modules
        }
        buffers = buffers or Buffers()
        self._buffers = {
            module: {
                name: buffers.copy(buffer)
                for name, buffer in module._buffers.items()
                if buffer is not None and is_plain(buffer)
            }
            for module in modules
        }
        kinds = {"cpu", *(device.type for device in random.devices)}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        self._device = torch.get_default_device()
        self._deterministic = torch.get_deterministic_debug_mode()

    @property
    def devices(self) -> Collection[torch.device]:
        """Those on which random numbers may be drawn."""
        return self._random.devices

    @property
    def cast_to(self) -> set[torch.dtype]:
        """The dtypes that autocast computes in."""
        return {dtype for _, dtype, enabled in self._autocast if enabled}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are as they were. Afterwards only `untouched` puts them back."""
        self._random.set()
        stand_ins: dict[int, Tensor] = {}
        for module, settings in self._settings.items():
            vars(module).update(settings)
            for name, copy in self._buffers[module].items():
                module._buffers[name] = stand_ins.setdefault(id(copy), copy.clone())
        if torch.get_deterministic_debug_mode() != self._deterministic:
            torch.set_deterministic_debug_mode(self._deterministic)
        with ExitStack() as contexts:
            for kind, dtype, enabled in self._autocast:
                contexts.enter_context(
                    # Its cache would keep what was made of weights that are not the run's.
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                )
            if self._device.type != "cpu":
                contexts.enter_context(self._device)
            yield


def untouched(
    modules: Collection[nn.Module], devices: Iterable[torch.device], run: Callable[[], T]
) -> T:
    """What a function gives that runs something again; afterwards all is as if it had not run.

    That is: random numbers, buffers and attributes of the modules, modes; but not what is written
    into objects that attributes refer to.

    Args:
        modules: those that run themselves; none where it is a twin of them.
        devices: those on which random numbers may be drawn, besides the host.
        run: the function.
    """
    random = Randomness({torch.device("cpu"), *devices}, modules)
    attributes = {module: dict(vars(module)) for module in modules}
    buffers = {module: dict(module._buffers) for module in modules}
    modes, cached, eager = function_modes(), parametrize._cache_enabled, forced_eager()
    deterministic, outside = torch.get_deterministic_debug_mode(), _rerun.under_way
    thread = ThreadState(whole=True)

    def put_back() -> None:
        _rerun.under_way = outside
        eager.leave()
        parametrize._cache_enabled = cached
        set_function_modes(modes)
        thread.put_back()
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        for module in modules:
            for name in vars(module).keys() - attributes[module].keys():
                del vars(module)[name]
            vars(module).update(attributes[module])
            module._buffers.clear()
            module._buffers.update(buffers[module])
        random.set()

    try:
        set_function_modes(())
        parametrize._cache_enabled = 0
        _rerun.under_way = True
        with eager, torch.inference_mode(False), torch.enable_grad():
            found = run()
        put_back()
        return found
    finally:  # again, where that was interrupted
        put_back()


class _Rerun(threading.local):
    """Whether a thread runs something of a training step again, which is no step itself."""

    under_way = False


_rerun = _Rerun()


def is_rerun() -> bool:
    """Whether what runs in this thread is a repetition of something earlier."""
    return _rerun.under_way


def devices_of(modules: Iterable[nn.Module]) -> list[torch.device]:
    """Those on which the modules may draw random numbers, besides the host."""
    held = {x.device for m in modules for x in (*m.parameters(), *m.buffers())}
    return [device for device in held if device.type not in ("cpu", "meta")]


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor that has its own numbers."""
    return type(tensor.data) is Tensor and not nn.parameter.is_lazy(tensor)


def version(tensor: Tensor) -> int:
    """Grows when something is written into the tensor."""
    return -1 if tensor.is_inference() else tensor._version
