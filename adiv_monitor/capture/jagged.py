"""Jagged nested tensors: samples of different lengths whose rows are stored one after the other.

A rule for a function that computes each row by itself also holds for the rows packed in
`values()`. These are all rows, since nothing is padded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses_in
from adiv_monitor.rerun.nested import tensors_in

# Functions that compute each row by itself.
_BY_ROW = ("linear", "layer_norm", "rms_norm", "embedding")


def is_nested(tensor: object) -> bool:
    """Return whether an object is a nested tensor of either layout."""
    return isinstance(tensor, Tensor) and tensor.is_nested


def packed(tensor: Tensor) -> Tensor:
    """Return the packed rows of a nested tensor; return any other tensor unchanged.

    Raises:
        Refused: the rows are not stored one after the other.
    """
    if not is_nested(tensor):
        return tensor
    jagged: Any = tensor
    if tensor.layout is not torch.jagged or jagged._ragged_idx != 1 or jagged.lengths() is not None:
        raise Refused(
            "it is used with a nested tensor whose rows do not lie one after the other: only the "
            "jagged layout is measured, with lengths that differ in the second dimension"
        )
    values: Tensor = jagged.values()
    return values.detach()


def uses_of_packed(
    name: str, call: FunctionCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Use]:
    """Return the uses in a call with a nested result, as uses of the packed rows.

    Args:
        name: the name of the function.
        call: the call with its result.
        args: its arguments.
        kwargs: see args.

    Raises:
        Refused: the function does not compute each row by itself.
    """
    given, named = tree_map_only(is_nested, packed, (args, dict(kwargs)))
    before = {id(tensor) for tensor in tensors_in(args, kwargs)}
    data = {id(t) for t in tensors_in(given, named)} - before  # packed: known to no one by its id
    rows = replace(
        call, result=packed(call.result), of_model=lambda t: id(t) not in data and call.of_model(t)
    )
    found = uses_in(name, rows, given, named)
    if found and name not in _BY_ROW:
        raise Refused(
            f"torch's {name} uses it with a nested tensor, and packed rows are measured only for "
            f"{', '.join(_BY_ROW)}"
        )
    return [_of_nested(use) for use in found]


def _of_nested(use: Use) -> Use:
    """Return the use with a layout that accepts the nested result and its gradient."""
    return replace(use, layout=lambda tensor: use.layout(packed(tensor)))


NESTED = "it is used with nested tensors, which {} does not cover"
