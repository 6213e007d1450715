"""Tensors in the arguments or results of a call: bare, or inside tuples, lists and dicts."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor


def mapped(value: Any, of_tensor: Callable[[Tensor], Any], of_other: Callable[[Any], Any]) -> Any:
    """Replace the tensors and the other leaves of an argument by the results of two functions.

    Tuples, lists and dicts keep their types.
    """
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, list | tuple):
        items = [mapped(item, of_tensor, of_other) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) in (dict, OrderedDict):
        return type(value)((k, mapped(item, of_tensor, of_other)) for k, item in value.items())
    return of_other(value)


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among the values, and in their tuples, lists and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
