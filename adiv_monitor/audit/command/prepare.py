"""From the options of an audit to its objects: model, batches, loss and optimizer."""

import csv
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from adiv_monitor.audit.command import models
from adiv_monitor.audit.command.code import (
    UsageError,
    blamed,
    imported,
    one_line,
    steps_of,
    watched,
)
from adiv_monitor.audit.command.data import data
from adiv_monitor.audit.command.options import Config
from adiv_monitor.audit.run import adamw, loss_of_output
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import (
    Function,
    Loss,
    OptimizerFactory,
    Setup,
    TargetLoss,
    seeded,
)
from adiv_monitor.audit.training.train import train

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # others: float32
_OTHERS = ("val", "test", "eval", "epoch")  # in names of columns that are no losses of steps


def prepare(config: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make everything that the config names, and try it with one training step of a copy.

    Returns:
        The arguments of `audit` that are objects, and notes that a reader of the report must know.

    Raises:
        UsageError: An option can't be used.
    """
    with blamed(f"--device {config.device}: can't be used here"):
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).add(1)
    with seeded(config.seed), watched(may_train=config.run_script) as ran:
        optimizer = optimizer_of(config.optimizer, config.optimizer_args)
        model = models.build(config.model, config.model_args)
        steps = steps_of(ran, model)
        trained = f"weights have been trained: {steps:,} steps during import" if steps else ""
        if config.checkpoint is not None:
            models.load(model, config.checkpoint, trusted=config.trust_checkpoint)
            trained = f"weights from {config.checkpoint}"
        dtype = _DTYPES.get(config.precision)
        model = model.to(device, dtype)
        if isinstance(optimizer, Optimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # onto the model's device
        batches, fitting, notes = data(config, model, device, dtype or torch.float32)
        name = config.loss or fitting
        loss: Loss = loss_of(name) if name else loss_of_output
    if config.precision == "bf16-mixed":
        loss = torch.autocast(device.type, torch.bfloat16)(loss)
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors(batches[0])) or "no tensors"
    with blamed(
        f"MODEL {config.model}: a training step on the first batch of --data {config.data}, "
        f"with shapes {shapes}, raised"
    ):
        setup = Setup(model, optimizer, loss, batches, 1, config.clip_norm, config.seed)
        train(setup.fork())
    return {
        "model": model,
        "batches": batches,
        "loss": loss,
        "optimizer": optimizer,
        "own_losses": own_losses(config.losses) if config.losses else None,
        "_facts": {"data": config.data, "loss": name or "", "trained": trained},
    }, notes


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of outputs (…, classes) and targets (…).

    Outputs (samples, classes, …) with targets (samples, …) are accepted, too.
    """
    if target.ndim > 1 and output.shape[:-1] == target.shape:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


LOSSES: Mapping[str, Function] = {
    "cross_entropy": _cross_entropy,
    **{name: getattr(F, f"{name}_loss") for name in ("nll", "mse", "l1", "smooth_l1", "huber")},
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
_OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def loss_of(name: str) -> Loss:
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


def optimizer_of(name: str, arguments: Mapping[str, Any]) -> Optimizer | OptimizerFactory:
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


def own_losses(file: str) -> dict[int, float]:
    """Read step → loss from a JSON list, Lightning's metrics.csv, or a trainer_state.json.

    A list holds the losses of the steps 0, 1, 2, …. Hugging Face's Trainer logs the mean since its
    last log, which is used for each of these steps.

    Raises:
        UsageError: the file can't be read, or holds no losses.
    """
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    try:
        losses = _of_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _of_csv(text)
        if not losses:
            raise ValueError("it holds no loss")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--losses {file}: {one_line(error)}; expected a JSON list of numbers, Lightning's "
            "metrics.csv, or a trainer_state.json of Hugging Face"
        ) from error
    return losses


def _of_json(found: Any) -> dict[int, float]:
    if isinstance(found, list):
        return {step: float(loss) for step, loss in enumerate(found)}
    losses: dict[int, float] = {}
    for entry in found["log_history"]:
        if "loss" in entry:  # its step is the number of complete steps
            losses |= dict.fromkeys(range(len(losses), int(entry["step"])), float(entry["loss"]))
    return losses


def _of_csv(text: str) -> dict[int, float]:
    rows = list(csv.DictReader(text.splitlines()))
    names = [name for name in (rows[0] if rows else ()) if name]
    columns = [n for n in names if "loss" in n and not any(word in n for word in _OTHERS)]
    if not columns:
        raise ValueError(f"no column of losses among {', '.join(names) or 'none'}")
    column = min(columns, key=lambda name: "step" not in name)  # else the first
    seen = ((row.get("step") or number, row[column]) for number, row in enumerate(rows))
    return {int(step): float(loss) for step, loss in seen if loss}
