"""From the options of an audit to its objects: model, batches, loss and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError, blamed, said
from adiv_monitor.audit.sources import checkpoints, losses, models, optimizers, script
from adiv_monitor.audit.sources.data import Data, data
from adiv_monitor.audit.training.setup import Loss, OptimizerFactory, Setup, seeded
from adiv_monitor.audit.training.train import train

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # others: float32


@dataclass(frozen=True)
class Prepared:
    """The objects that an audit works on.

    Attributes:
        config: The options, with the inferred values of those that were not set.
        model: The model, on its device.
        batches: Batches on the same device.
        loss: model, batch → scalar.
        optimizer: An optimizer of the model's parameters, or model → optimizer.
        notes: Remarks that a reader of the report must know.
        facts: Data, loss and what the weights have been through, in words.
    """

    config: Config
    model: nn.Module
    batches: tuple[Any, ...]
    loss: Loss
    optimizer: Optimizer | OptimizerFactory
    notes: tuple[str, ...]
    facts: Mapping[str, str]


def prepare(config: Config) -> Prepared:
    """Make everything that the config names, and try it with one training step of a copy.

    Raises:
        UsageError: An option can't be used.
    """
    device = _device(config.device)
    dtype = _DTYPES.get(config.precision, torch.float32)
    with seeded(config.seed), script.watched(may_train=config.run_script) as ran:
        optimizer = optimizers.named(config.optimizer, config.optimizer_args)
        model = _model(config, optimizer)
        trained = _trained(config, model, ran)
        model = model.to(device, dtype if config.precision in _DTYPES else None)
        if isinstance(optimizer, Optimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # onto the model's device
        found = data(config, model, device, dtype)
        loss = _loss(config, found, device)
    batches = tuple(found.batches)
    _try_a_step(Setup(model, optimizer, loss, batches, 1, config.clip_norm, config.seed))
    resolved = replace(
        config,
        input_shape=None if found.inputs is None else found.inputs.shape,
        num_classes=found.classes,
        loss=config.loss or found.loss,
        device=str(device),
    )
    facts = {"data": config.data, "loss": resolved.loss or "", "trained": trained}
    return Prepared(resolved, model, batches, loss, optimizer, found.notes, facts)


def _model(config: Config, optimizer: Optimizer | OptimizerFactory) -> nn.Module:
    """Return the model with its weights; not a copy if the optimizer is of its parameters."""
    is_held = isinstance(optimizer, Optimizer)
    model = models.build(config.model, config.model_args, copies=not is_held)
    if isinstance(optimizer, Optimizer):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in held for p in model.parameters()):
            raise UsageError(
                f"--optimizer {config.optimizer}: holds no parameter of MODEL {config.model}; give "
                "the module that it was made for as MODEL, or a function model → optimizer here"
            )
    if config.checkpoint is not None:
        checkpoints.load(model, config.checkpoint, trusted=config.trust_checkpoint)
    return model


def _trained(config: Config, model: nn.Module, ran: script.Ran) -> str:
    """Return what the weights have been through, in words; "" if they are as they were drawn."""
    if config.checkpoint is not None:
        return f"weights from {config.checkpoint}"
    steps = ran.steps_of(model, copied=models.is_instance(config.model))
    return f"weights have been trained: {steps:,} steps during import" if steps else ""


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with blamed(f"--device {name}: can't be used here"):
        device = torch.device(name)
        torch.empty(1, device=device).add(1)
    return device


def _loss(config: Config, found: Data, device: torch.device) -> Loss:
    name = config.loss or found.loss
    loss = losses.own_loss if name is None else losses.named(name)
    if config.precision == "bf16-mixed":
        return losses.UnderAutocast(loss, device.type, torch.bfloat16)
    return loss


def _try_a_step(setup: Setup) -> None:
    """Train a copy for one step, so that a mismatch shows before anything long begins."""
    with blamed("a training step on the first batch raised"):
        try:
            train(setup.fork())
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"{said(error)}: give a smaller --batch-size or --input-shape"
            ) from error
