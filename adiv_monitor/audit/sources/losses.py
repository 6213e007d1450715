"""Losses by name or import path, as functions of model and batch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.training.setup import Loss
from adiv_monitor.audit.training.target_loss import Function, TargetLoss

Targets = Literal["classes", "values", "shares"]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of outputs (…, classes) and targets (…).

    Outputs (samples, classes, …) with targets (samples, …) are accepted, too.
    """
    if not len(output):
        raise ValueError("the batch has no samples")
    if output.numel() == len(output):  # its loss would be 0 for any output
        raise ValueError("one number for each sample tells no classes apart")
    if target.ndim > 1 and output.shape[:-1] == target.shape:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


def _same_shape(function: Function) -> Function:
    def of_same_shape(output: Tensor, target: Tensor) -> Tensor:
        if output.shape != target.shape:  # torch would broadcast one to the other
            raise ValueError("expected a target of the output's shape")
        return function(output, target)

    return of_same_shape


# Name → the loss, and the kind of targets that it takes.
NAMED: Mapping[str, tuple[Function, Targets]] = {
    "cross_entropy": (_cross_entropy, "classes"),
    "nll": (F.nll_loss, "classes"),
    "mse": (_same_shape(F.mse_loss), "values"),
    "l1": (_same_shape(F.l1_loss), "values"),
    "smooth_l1": (_same_shape(F.smooth_l1_loss), "values"),
    "huber": (_same_shape(F.huber_loss), "values"),
    "binary_cross_entropy_with_logits": (
        _same_shape(F.binary_cross_entropy_with_logits),
        "shares",
    ),
}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the `loss` of a model's output for a batch of keyword arguments."""
    loss = getattr(model(**batch), "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{type(model).__name__} gave no loss for a batch of {', '.join(batch)}: expected "
            "batches with the labels it needs, or --loss with a function (model, batch)"
        )
    return loss


@dataclass(frozen=True)
class UnderAutocast:
    """A loss whose forward pass runs under torch.autocast.

    Operators that torch holds to be safe run in the lower precision.
    """

    loss: Loss
    device: str
    dtype: torch.dtype

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the model on the batch."""
        with torch.autocast(self.device, self.dtype):
            return self.loss(model, batch)


def named(name: str) -> Loss:
    """Return the loss of that name.

    Args:
        name: One of `NAMED`; or the import path of a function (output, target) → scalar, of a loss
            class such as torch.nn:CrossEntropyLoss, or of a function (model, batch) → scalar,
            recognized by the names of its two parameters.

    Raises:
        UsageError: There is no such loss.
    """
    if name in NAMED:
        return TargetLoss(name, NAMED[name][0])
    if "." not in name and ":" not in name:
        raise UsageError(
            f"--loss {name}: there is none of that name; expected one of {', '.join(NAMED)}, or an "
            "import path such as torch.nn:CrossEntropyLoss"
        )
    found = imported(name, "--loss")
    if inspect.isclass(found):
        with blamed(f"--loss {name}: can't be made"):
            found = found()
    if not callable(found):
        raise UsageError(f"--loss {name}: got a {type(found).__name__}, expected a function")
    if _parameters(found) == ["model", "batch"]:
        loss: Loss = found
        return loss
    return TargetLoss(name, found)


def default(target: Any) -> str:
    """Return the name of the default loss for a target: whole numbers are classes."""
    is_classes = isinstance(target, Tensor) and not (
        target.is_floating_point() or target.is_complex()
    )
    return "cross_entropy" if is_classes else "mse"


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
