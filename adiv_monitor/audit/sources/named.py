"""Losses and optimizers by name or import path."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.run import adamw
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.training.setup import Loss, OptimizerFactory
from adiv_monitor.audit.training.target_loss import Function, TargetLoss


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of outputs (…, classes) and targets (…).

    Outputs (samples, classes, …) with targets (samples, …) are accepted, too.
    """
    if target.ndim > 1 and output.shape[:-1] == target.shape:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


LOSSES: Mapping[str, Function] = {
    "cross_entropy": _cross_entropy,
    "nll": F.nll_loss,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
_OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def loss(name: str) -> Loss:
    """Return the loss of that name.

    Args:
        name: One of `LOSSES`; or the import path of a function (output, target) → scalar, of a loss
            class such as torch.nn:CrossEntropyLoss, or of a function (model, batch) → scalar,
            recognized by the names of its two parameters.

    Raises:
        UsageError: There is no such loss.
    """
    found: Any = LOSSES.get(name) or imported(name, "--loss", LOSSES)
    with blamed(f"--loss {name}"):
        if inspect.isclass(found):
            found = found()
        of_model = list(inspect.signature(found).parameters) == ["model", "batch"]
    return found if of_model else TargetLoss(name, found)


def under_autocast(loss: Loss, device: str, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of the model on the batch, whose forward pass runs under torch.autocast."""
    with torch.autocast(device, torch.bfloat16):
        return loss(model, batch)


def optimizer(name: str, arguments: Mapping[str, Any]) -> Optimizer | OptimizerFactory:
    """Return the optimizer of that name, or a function that makes it for a model.

    Args:
        name: Name of a class in torch.optim, in any case ("adamw"); or the import path of an
            optimizer class, called with the parameters and the arguments, of a function, called
            with the model and the arguments, or of an optimizer that exists.
        arguments: Keyword arguments.

    Raises:
        UsageError: There is no such optimizer. The returned function raises it if the optimizer
            can't be made with these arguments.
    """
    if name.lower() == "adamw" and not arguments:
        return adamw
    found: Any = _OPTIMIZERS.get(name.lower()) or imported(name, "--optimizer", _OPTIMIZERS)
    if isinstance(found, Optimizer):
        if arguments:
            raise UsageError(f"--optimizer {name}: takes no --optimizer-args: it is made already")
        return found
    takes_parameters = inspect.isclass(found) and issubclass(found, Optimizer)

    def made(model: nn.Module) -> Optimizer:
        with blamed(f"--optimizer {name} with --optimizer-args {dict(arguments)}"):
            one: Optimizer = found(model.parameters() if takes_parameters else model, **arguments)
        return one

    return made
