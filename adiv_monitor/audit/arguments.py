"""Checks of the arguments of `audit`; their errors say what is expected."""

import math

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from adiv_monitor.audit.training.target_loss import takes_outputs


def check_training(model: object, loss: object, optimizer: object) -> None:
    """Raise TypeError or ValueError if the model, loss or optimizer can't be used for training."""
    _check_model(model)
    if isinstance(loss, nn.modules.loss._Loss) and not takes_outputs(loss):
        raise TypeError(
            f"audit(loss=…): got {type(loss).__name__}, which takes more than outputs and targets, "
            "expected a function (model, batch) → loss, such as lambda model, batch: "
            "criterion(model(batch[0]), batch[1], batch[2])"
        )
    if loss is not None and not callable(loss):
        raise TypeError(
            f"audit(loss=…): got {type(loss).__name__}, expected a function (model, batch) → loss "
            "or (output, target) → loss, or None where the model gives its own"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(
            f"audit(optimizer=…): got {type(optimizer).__name__}, expected a torch.optim.Optimizer "
            "over the model's parameters, or a function model → optimizer"
        )


def check_numbers(
    *,
    steps: object,
    every_n_steps: object,
    max_rows: object,
    clip_norm: object,
    seed: object,
    try_seconds: object,
) -> None:
    """Raise ValueError if a numeric argument is out of its range."""
    counts = {"steps": steps, "every_n_steps": every_n_steps, "max_rows": max_rows}
    for name, value in counts.items():
        may_be_none = name != "steps" and value is None
        if not may_be_none and (not _is_whole(value) or value < 1):  # type: ignore[operator]
            raise ValueError(f"audit({name}=…): got {value!r}, expected an integer of at least 1")
    if not _is_whole(seed) or seed < 0:  # type: ignore[operator]
        raise ValueError(f"audit(seed=…): got {seed!r}, expected an integer of at least 0")
    if clip_norm is not None and not _is_positive(clip_norm):
        raise ValueError(
            f"audit(clip_norm=…): got {clip_norm!r}, expected a number above 0, or None not to clip"
        )
    is_number = isinstance(try_seconds, (int, float)) and not isinstance(try_seconds, bool)
    if not is_number or not try_seconds >= 0:  # type: ignore[operator]
        raise ValueError(
            f"audit(try_seconds=…): got {try_seconds!r}, expected a number of at least 0"
        )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit(model=…): got {type(model).__name__}, expected a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"audit(model=…): got a {type(model).__name__} whose parameter {lazy[0]} has no shape "
            "yet, expected one that has run: call it with one batch first"
        )
    if not any(p.requires_grad for p in model.parameters()):
        frozen = any(True for _ in model.parameters())
        raise ValueError(
            f"audit(model=…): got a {type(model).__name__} without trainable parameters, expected "
            "at least one" + ("; all have requires_grad=False" if frozen else "")
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]
