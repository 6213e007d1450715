"""What modules keep in attributes beside parameters and buffers: no rerun changes it.

A forward pass may write into tensors, arrays and containers that are plain attributes, such as a
running mean in a dictionary. Their contents are saved and written back in place: hooks, closures
and other modules that refer to the same objects see the same state.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Types of attributes that no forward pass can write into, but may set anew.
SETTINGS = (bool, int, float, str, NoneType)
OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, modules, hooks and flags
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_DATA = (*SETTINGS, *CONTAINERS, complex, bytes, tuple, Tensor, np.ndarray, np.generic)
# Larger tensors, arrays and containers are data, tables and vocabularies rather than state.
_MOST_ENTRIES, _MOST_ITEMS = 2**24, 10_000
_MOST_FROZEN = 2**22  # entries of a parameter; those of large pretrained models have more


def may_be_written(frozen: Tensor) -> bool:
    """Return whether a frozen parameter is kept from a forward pass that may write to it.

    Such are the average of a teacher and a codebook.
    """
    if nn.parameter.is_lazy(frozen) or not is_writable(frozen):
        return False
    # Numbers of eight bits have no arithmetic.
    is_float = frozen.is_floating_point() and frozen.element_size() > 1
    return is_float and frozen.numel() <= _MOST_FROZEN


def is_writable(tensor: Tensor) -> bool:
    """Return whether values can be written back to a tensor: each has a place of its own."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized:
        return False
    sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
    if any(size > 1 and stride == 0 for size, stride in sizes):  # expanded
        return False
    end = tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in sizes)
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()  # not freed


def kept_by(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that it may read, set anew, or write into.

    These are settings, tensors without a graph, arrays, containers, and objects that consist of
    such things.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in SETTINGS or (name not in OF_TORCH and _is_data(value))
    }


def _is_data(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is None
    if isinstance(value, (tuple, np.ndarray)) or type(value) in CONTAINERS:
        return True
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or isinstance(value, nn.Module) or callable(value):
        return False
    return all(type(x) in _DATA for x in own.values())


class Contents:
    """The present contents of all that attributes of modules refer to.

    Parameters, tensors that share their memory, trained tensors, and what is too large for a state
    are left out.

    Args:
        modules: the modules.
        copy: makes the copies of tensors.
    """

    def __init__(
        self, modules: Iterable[nn.Module], copy: Callable[[Tensor], Tensor] = Tensor.clone
    ) -> None:
        self._tensors: list[tuple[Tensor, int, Tensor]] = []  # with the version, and the copy
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        modules = list(modules)
        parameters: set[int] | None = None
        for value in _within([x for module in modules for x in kept_by(module).values()]):
            if isinstance(value, Tensor):
                parameters = _memory_of_parameters(modules) if parameters is None else parameters
                if _is_state(value) and value.untyped_storage().data_ptr() not in parameters:
                    with torch.no_grad():
                        self._tensors.append((value, value._version, copy(value)))
            elif isinstance(value, np.ndarray):
                is_plain = type(value) is np.ndarray and value.dtype != object
                if is_plain and value.size <= _MOST_ENTRIES:
                    self._arrays.append((value, value.copy()))
            elif type(value) in CONTAINERS:
                self._containers.append((value, value.copy()))

    def put_back(self) -> None:
        """Write the saved contents back, into the same objects."""
        for container, before in self._containers:
            if not _holds(container, before):
                container.clear()
                fill = container.extend if hasattr(container, "extend") else container.update
                fill(before)
        for tensor, number, copy in self._tensors:
            is_same = tensor._version == number and tensor.device.type == "cpu"
            if not (is_same and torch.equal(tensor, copy)) and _is_state(tensor):
                tensor.data.copy_(copy)  # the training's graph counts no version
        for array, values in self._arrays:
            if not np.array_equal(array, values):
                array[...] = values


def _holds(container: Any, before: Any) -> bool:
    """Return whether a container holds the same objects as before, in the same order."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return bool(container == before)
    pairs = zip(container, before, strict=True)
    is_same = all(x is y or (type(x) in SETTINGS and x == y) for x, y in pairs)
    return is_same and (
        not isinstance(container, dict) or all(container[key] is before[key] for key in before)
    )


def _within(values: list[Any]) -> Iterator[Any]:
    """Yield values and all that they contain, each once: tensors, arrays and containers."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if type(value) in SETTINGS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (Tensor, np.ndarray)):
            yield value
        elif isinstance(value, tuple):
            values += value
        elif type(value) in CONTAINERS:
            if len(value) <= _MOST_ITEMS:
                values += value.values() if isinstance(value, dict) else value
                yield value
        elif _is_data(value):
            values.append(vars(value))


def _is_state(tensor: Tensor) -> bool:
    """Return whether a tensor may hold a state: a plain one, in memory of its own, not trained."""
    if type(tensor) is not Tensor or tensor.requires_grad:
        return False
    return 0 < tensor.numel() <= _MOST_ENTRIES and is_writable(tensor)


def _memory_of_parameters(modules: Iterable[nn.Module]) -> set[int]:
    held = [p for module in modules for p in module._parameters.values() if p is not None]
    plain = [p for p in held if type(p.data) is Tensor and p.layout is torch.strided]
    return {p.untyped_storage().data_ptr() for p in plain if not p.is_meta}
