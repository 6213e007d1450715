"""Tensors in the arguments or results of a call: bare, or inside tuples, lists and dicts."""

from typing import Any

from torch import Tensor


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
