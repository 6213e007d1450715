"""The state that a call depends on besides inputs and parameters; reruns without side effects."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.kept import Contents, kept_by
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import ThreadState, function_modes, run_apart, set_function_modes

T = TypeVar("T")


class Buffers:
    """Copies of buffers; a buffer is copied again only after it has changed."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy(self, buffer: Tensor) -> Tensor:
        """Return a copy of the buffer's present value."""
        key = id(buffer), version(buffer)
        if key not in self._copies:
            self._copies[key] = buffer, buffer.detach().clone()
        return self._copies[key][1]


class Surroundings:
    """The present state that a call depends on besides its inputs and parameters.

    This is the state of random number generators, autocast, the default device, the deterministic
    mode, and the buffers and attributes of modules.

    Args:
        random: saved states of the generators.
        modules: the modules whose buffers and attributes are saved; a twin has its own.
        buffers: makes the copies of the buffers.
    """

    def __init__(
        self,
        random: Randomness,
        modules: Collection[nn.Module] = (),
        buffers: Buffers | None = None,
    ) -> None:
        self._random = random
        buffers = buffers or Buffers()
        self._attributes = {module: kept_by(module) for module in modules}
        self._contents = Contents(modules, buffers.copy)
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
        """The devices on which random numbers may be drawn."""
        return self._random.devices

    @property
    def cast_to(self) -> set[torch.dtype]:
        """The dtypes that autocast casts to, where it is enabled."""
        return {dtype for _, dtype, enabled in self._autocast if enabled}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the saved state within the context; only `untouched` restores it afterwards."""
        self._random.set()
        stand_ins: dict[int, Tensor] = {}
        for module, attributes in self._attributes.items():
            vars(module).update(attributes)
            for name, copy in self._buffers[module].items():
                module._buffers[name] = stand_ins.setdefault(id(copy), copy.clone())
        self._contents.put_back()
        if torch.get_deterministic_debug_mode() != self._deterministic:
            torch.set_deterministic_debug_mode(self._deterministic)
        with ExitStack() as contexts:
            for kind, dtype, enabled in self._autocast:
                contexts.enter_context(
                    # A cache would keep casts of weights that are not the run's.
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                )
            if self._device.type != "cpu":
                contexts.enter_context(self._device)
            yield


def untouched(
    modules: Collection[nn.Module],
    devices: Iterable[torch.device],
    run: Callable[[], T],
    *,
    copied: Collection[nn.Module] = (),
) -> T:
    """Call a function that reruns something, and restore all state afterwards.

    Restored are random numbers, buffers and attributes of the modules, what attributes refer to
    (see `Contents`), and modes.

    Args:
        modules: the original modules that run; empty if a twin runs.
        devices: the devices on which random numbers may be drawn, besides the host.
        run: the function.
        copied: the modules of which copies run; they may draw from generators outside of them.

    Returns:
        The function's result.
    """
    random = Randomness({torch.device("cpu"), *devices}, [*modules, *copied])
    attributes = {module: dict(vars(module)) for module in modules}
    buffers = {module: dict(module._buffers.items()) for module in modules}
    contents = Contents(modules)
    scripted = {m: m.training for m in modules if isinstance(m, torch.jit.ScriptModule)}
    cached = parametrize._cache_enabled, parametrize._cache
    modes, eager = function_modes(), forced_eager()
    deterministic, outside = torch.get_deterministic_debug_mode(), _rerun.under_way
    thread = ThreadState(whole=True)
    restored = False

    def put_back() -> None:
        _rerun.under_way = outside
        eager.leave()
        parametrize._cache_enabled, parametrize._cache = cached
        set_function_modes(modes)
        thread.put_back()
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        for module in modules:
            for name in vars(module).keys() - attributes[module].keys():
                del vars(module)[name]
            vars(module).update(attributes[module])
            if module not in scripted:
                module._buffers.clear()
            for name, buffer in buffers[module].items():
                module._buffers[name] = buffer
        contents.put_back()
        for module, was_training in scripted.items():
            module.training = was_training  # not among its attributes
        random.set()

    try:
        set_function_modes(())
        parametrize._cache_enabled, parametrize._cache = 0, {}
        _rerun.under_way = True
        with eager, torch.inference_mode(False), torch.enable_grad():
            found = run_apart(run)
        put_back()
        restored = True
        return found
    finally:  # if the run raised, or an interrupt hit the first call
        if not restored:
            put_back()


class _Rerun(threading.local):
    """Flag of a thread: whether it reruns part of a training step, which is no step itself."""

    under_way = False


_rerun = _Rerun()


def is_rerun() -> bool:
    """Whether this thread is rerunning an earlier call."""
    return _rerun.under_way


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
