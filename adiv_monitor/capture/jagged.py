"""Jagged nested tensors: samples of different lengths, whose rows lie one after the other.

What a rule says of a function that computes each row by itself holds for the rows that are packed
in their `values()`, which are all that there are: nothing is padded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adiv_monitor.features.uses import FunctionCall, Refused, Use, uses_in

# Functions that compute each row by itself.
_BY_ROW = ("linear", "layer_norm", "rms_norm", "embedding")


def is_nested(tensor: object) -> bool:
    """Whether it is a nested tensor, of either layout."""
    return isinstance(tensor, Tensor) and tensor.is_nested


def packed(tensor: Tensor) -> Tensor:
    """The rows of a nested tensor, one after the other; any other tensor itself.

    Raises:
        Refused: they don't lie so.
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
    """The uses in a call that gave a nested tensor, as those of the rows that it packs.

    Args:
        name: of the function.
        call: with its result.
        args: its arguments.
        kwargs: see args.

    Raises:
        Refused: the function does not compute each row by itself.
    """
    rows = replace(call, result=packed(call.result))
    args, named = tree_map_only(is_nested, packed, (args, dict(kwargs)))
    found = uses_in(name, rows, args, named)
    if found and name not in _BY_ROW:
        raise Refused(
            f"torch's {name} uses it with a nested tensor, whose packed rows are measured only "
            f"of {', '.join(_BY_ROW)}"
        )
    return [_of_nested(use) for use in found]


def _of_nested(use: Use) -> Use:
    """The use with a layout that takes the nested result, and its gradient."""
    return replace(use, layout=lambda tensor: use.layout(packed(tensor)))


NESTED = "it is used with nested tensors, of which {} says nothing"
