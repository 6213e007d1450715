"""What modules keep in attributes beside parameters, buffers and settings, and copies of it.

A forward pass may write into tensors, arrays and containers that are plain attributes, such as a
running mean in a dictionary. A rerun gets copies of them, so that it changes none.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from functools import cached_property
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Attributes = Mapping[nn.Module, Mapping[str, Any]]
# Types of attributes that no forward pass can write into.
SETTINGS = (bool, int, float, str, NoneType)
_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, modules, hooks and flags
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_FIXED = (*SETTINGS, complex, bytes, type, torch.dtype, torch.device, torch.Size, torch.layout)
_DATA = (*_FIXED, *_CONTAINERS, tuple, Tensor, np.ndarray, np.generic)


def kept_by(modules: list[nn.Module]) -> Attributes:
    """Return the attributes of modules into which a forward pass may write.

    Other objects than tensors, arrays and containers belong to them if all that they consist of
    are such things, or settings.
    """
    return {
        module: {
            name: value
            for name, value in vars(module).items()
            if name not in _OF_TORCH and not isinstance(value, _FIXED) and _is_data(value)
        }
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)
    }


def _is_data(value: object) -> bool:
    if type(value) in _DATA or isinstance(value, (Tensor, np.ndarray, tuple)):
        return True
    if isinstance(value, nn.Module) or callable(value):
        return False
    own = getattr(value, "__dict__", None)
    return type(own) is dict and all(type(x) in _DATA for x in own.values())


def copied(kept: Attributes) -> Attributes:
    """Return copies; an object that several attributes refer to has one copy.

    Modules, parameters, tensors that share their memory, and results of functions that will be
    differentiated stay what they are, and so do objects of unknown kinds.
    """
    copies = _Copies(kept)
    return {
        module: {name: copies.of(value) for name, value in attributes.items()}
        for module, attributes in kept.items()
    }


class _Copies:
    """Makes copies, each of them once."""

    def __init__(self, kept: Attributes) -> None:
        self._modules = list(kept)
        self._made: dict[int, tuple[Any, Any]] = {}  # by id: the object, held, and its copy

    def of(self, value: Any) -> Any:
        """Return the copy of a value."""
        if isinstance(value, _FIXED):
            return value
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Tensor):
            return self._is(value, self._tensor(value))
        if isinstance(value, np.ndarray):
            return self._is(value, value.copy())
        if isinstance(value, tuple):
            return self._tuple(value)
        if type(value) in _CONTAINERS:
            return self._container(value)
        return self._object(value) if _is_data(value) else value

    def _is(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = value, made
        return made

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.grad_fn is not None:
            return tensor
        if type(tensor.data) is not Tensor or _memory(tensor) in self._parameters:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    @cached_property
    def _parameters(self) -> set[int]:
        held = [p for module in self._modules for p in module._parameters.values()]
        return {_memory(p) for p in held if p is not None} - {0}

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        parts = [self.of(x) for x in value]
        if all(x is y for x, y in zip(value, parts, strict=True)):
            return value
        if type(value) is tuple:
            return tuple(parts)
        make = getattr(value, "_make", None)  # of a named tuple
        return value if make is None else make(parts)

    def _container(self, value: Any) -> Any:
        made = self._is(value, copy.copy(value))
        if isinstance(value, dict):
            for key, x in value.items():
                made[key] = self.of(x)
        elif isinstance(value, (list, deque)):
            for i, x in enumerate(value):
                made[i] = self.of(x)
        return made

    def _object(self, value: Any) -> Any:
        try:
            made = self._is(value, copy.copy(value))
        except Exception:  # an object may refuse to be copied
            return value
        vars(made).update({name: self.of(x) for name, x in vars(value).items()})
        return made


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0: it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or not materialised
        return 0
