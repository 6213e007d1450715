"""Runs modules again in place: other parameters for a while, and no trace afterwards."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize

from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.thread import function_modes, run_apart, set_function_modes, surely

T = TypeVar("T")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, modules and hooks
# Larger tensors in attributes are data; larger frozen parameters are those of pretrained models.
_MOST_ENTRIES, _MOST_FROZEN = 2**24, 2**22


class Surroundings:
    """The present state that a call depends on besides its inputs and parameters.

    This is the state of random number generators, autocast, and the buffers and attributes of
    modules.

    Args:
        random: saved states of the generators.
        modules: the modules whose buffers and attributes are saved.
    """

    def __init__(
        self,
        random: Randomness,
        modules: Collection[nn.Module] = (),
    ) -> None:
        self._random = random
        self._state = _State(modules)
        kinds = {"cpu", *(device.type for device in random.devices)}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]

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
        self._state.set_copies()
        with ExitStack() as contexts:
            for kind, dtype, enabled in self._autocast:
                contexts.enter_context(
                    # A cache would keep casts of weights that are not the run's.
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                )
            yield


class _State:
    """Attributes and buffers of modules, with copies of the tensors among them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._copies: dict[int, Tensor] = {}
        self._held = [
            (
                module,
                self._copied((n, x) for n, x in vars(module).items() if n not in _OF_TORCH),
                self._copied(module._buffers.items()),
            )
            for module in modules
        ]

    def _copied(self, items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return settings, and copies of the tensors that a forward pass may write to."""
        return {n: self._copy(x) for n, x in items if not isinstance(x, Tensor) or _is_state(x)}

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value.detach().clone()
        return self._copies[id(value)]

    def set_copies(self) -> None:
        """Let the modules hold this state; what they write to its tensors does not change it."""
        copies = {id(x): x.clone() for x in self._copies.values()}
        for module, attributes, buffers in self._held:
            vars(module).update((n, copies.get(id(x), x)) for n, x in attributes.items())
            module._buffers.update((n, copies.get(id(x), x)) for n, x in buffers.items())


def _is_state(tensor: Tensor) -> bool:
    """Return whether a tensor may hold a state: a plain one, in memory of its own, not trained."""
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.numel() > _MOST_ENTRIES:
        return False
    return _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether each entry has a place of its own: not in expanded or freed tensors."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


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
        parameters: values of parameters; what the modules write to them is lost.

    Returns:
        The function's result.
    """
    plain = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    random = Randomness({torch.device("cpu"), *surroundings.devices}, plain)
    own = [(m, dict(vars(m)), dict(m._buffers)) for m in plain]
    scripted = [(m, m.training) for m in modules if isinstance(m, torch.jit.ScriptModule)]
    given = {**_written_to(plain), **(parameters or {})}
    data = {parameter: parameter.data for parameter in given}
    cached = parametrize._cache_enabled, parametrize._cache

    def put_back() -> None:
        parametrize._cache_enabled, parametrize._cache = cached
        _set(data)
        for module, attributes, buffers in own:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for module, was_training in scripted:  # it is not among their attributes
            module.training = was_training
        random.set()

    with ExitStack() as stack:
        stack.callback(setattr, _rerun, "depth", _rerun.depth)
        stack.callback(surely, set_function_modes, function_modes())
        stack.callback(surely, put_back)
        set_function_modes(())
        parametrize._cache_enabled, parametrize._cache = 0, {}
        _rerun.depth += 1
        for context in (forced_eager(), torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(context)
        # The graph of a running forward pass may have saved them: no write to a copy counts there.
        stack.enter_context(_unsafe_preserve_version_counter(tuple(given)))
        _State(plain).set_copies()
        _set(given)
        found: T = run_apart(_within, surroundings, run)
        return found


def _within(surroundings: Surroundings, run: Callable[[], T]) -> T:
    with surroundings.again():
        return run()


def _written_to(modules: Iterable[nn.Module]) -> dict[nn.Parameter, Tensor]:
    """Return copies of the parameters that a forward pass may write to.

    These are the average of a teacher, a codebook, and the weight of an embedding with `max_norm`.
    """
    found = {}
    for module in modules:
        for p in module._parameters.values():
            if p is None or not is_plain(p) or not (p.is_floating_point() and _has_memory(p)):
                continue
            is_small = not p.requires_grad and p.numel() <= _MOST_FROZEN
            if is_small or getattr(module, "max_norm", None) is not None:
                found[p] = p.detach().clone()
    return found


def _set(values: Mapping[nn.Parameter, Tensor]) -> None:
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
