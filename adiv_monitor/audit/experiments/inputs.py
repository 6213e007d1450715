"""The arguments of a forward pass, by name: inputs, labels, lists of samples."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Words in the names of arguments that are not inputs.
_NO_INPUTS = ("label", "target", "mask")


def by_name(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass by name; those without a name have a number."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*own, *map(str, range(len(own), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def changed(
    module: nn.Module, args: Any, kwargs: dict[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward pass, each replaced by `change(name, value)`."""
    new = [change(name, value) for name, value in by_name(module, args, kwargs).items()]
    return tuple(new[: len(args)]), dict(zip(kwargs, new[len(args) :], strict=True))


def is_input(name: str) -> bool:
    """Return whether an argument of this name is an input, not a label, a target or a mask."""
    return not any(word in name.lower() for word in _NO_INPUTS)


def is_list(value: Any) -> bool:
    """Return whether an argument is a list of tensors, which may be the samples themselves."""
    several = isinstance(value, (list, tuple)) and len(value) > 1
    return several and all(isinstance(item, Tensor) for item in value)
