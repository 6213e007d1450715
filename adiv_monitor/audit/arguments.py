"""Checks of the arguments of `audit`, and of options; their errors say what is expected."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

# Argument → its types, what else is true of it, and both in words.
_COUNT = (int, lambda x: x >= 1, "an integer of at least 1")
_NUMBER = (int, float)
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("steps", "every_n_steps", "max_rows", "batch_size", "num_classes"), _COUNT),
    "seed": (int, lambda x: x >= 0, "an integer of at least 0"),
    "clip_norm": (_NUMBER, lambda x: 0 < x < math.inf, "a number above 0, or None not to clip"),
    "try_seconds": (_NUMBER, lambda x: x >= 0, "a number of at least 0"),
}
_OPTIONAL = ("steps", "every_n_steps", "max_rows", "num_classes", "clip_norm")


def check_numbers(
    given: Mapping[str, Any], named: Callable[[str], str] = "audit({}=…)".format
) -> None:
    """Raise ValueError if a numeric argument, or an option, is out of its range.

    Args:
        given: values by name, of which those that are not in the table are not checked.
        named: function of a name that returns how the user knows it.
    """
    for name in given.keys() & _NUMBERS.keys():
        value, (kinds, is_right, words) = given[name], _NUMBERS[name]
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and is_right(value)
        if not is_number and not (value is None and name in _OPTIONAL):
            raise ValueError(f"{named(name)}: got {value!r}, expected {words}")


def check_training(model: object, loss: object, optimizer: object) -> None:
    """Raise TypeError or ValueError if the model, loss or optimizer can't be used for training."""
    check_model(model)
    if loss is not None and not callable(loss):
        raise TypeError(
            f"audit(loss=…): got {type(loss).__name__}, expected a function (model, batch) → loss "
            "or (output, target) → loss, or None where the model gives its own"
        )
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(
            f"audit(optimizer=…): got {type(optimizer).__name__}, expected a torch.optim.Optimizer "
            "over the model's parameters, or a function model → optimizer"
        )


def check_model(model: object) -> None:
    """Raise TypeError or ValueError if this is no model, or has nothing to train."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit(model=…): got {type(model).__name__}, expected a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"audit(model=…): got a {type(model).__name__} whose parameter {lazy[0]} has no shape "
            "yet, expected one that has run: call it with one batch first"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"audit(model=…): got a {type(model).__name__} without trainable parameters, expected "
            "at least one with requires_grad=True"
        )
