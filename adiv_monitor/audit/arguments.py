"""Checks of the arguments of `audit`; their errors say what is expected."""

import math
from typing import Any

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
    steps: Any,
    every_n_steps: Any,
    max_rows: Any,
    clip_norm: Any,
    seed: Any,
    try_seconds: Any,
) -> None:
    """Raise ValueError if a numeric argument is out of its range."""
    counts = {"steps": steps, "every_n_steps": every_n_steps, "max_rows": max_rows, "seed": seed}
    for name, value in counts.items():
        least = 0 if name == "seed" else 1
        may_be_none = value is None and name in ("every_n_steps", "max_rows")
        if not may_be_none and not (_is_number(value, int) and value >= least):
            raise ValueError(
                f"audit({name}=…): got {value!r}, expected an integer of at least {least}"
            )
    if clip_norm is not None and not (_is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise ValueError(
            f"audit(clip_norm=…): got {clip_norm!r}, expected a number above 0, or None not to clip"
        )
    if not (_is_number(try_seconds) and try_seconds >= 0):
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


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
