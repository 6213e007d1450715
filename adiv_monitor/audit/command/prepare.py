"""From the options of an audit to its objects: model, batches, loss and optimizer."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import UsageError, said
from adiv_monitor.audit.sources import checkpoints, losses, models, optimizers
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
        optimizer: model → optimizer.
        notes: Remarks that a reader of the report must know.
    """

    config: Config
    model: nn.Module
    batches: tuple[Any, ...]
    loss: Loss
    optimizer: OptimizerFactory
    notes: tuple[str, ...]


def prepare(config: Config) -> Prepared:
    """Make everything that the config names, and try it with one training step of a copy.

    Raises:
        UsageError: An option can't be used.
    """
    device = _device(config.device)
    dtype = _DTYPES.get(config.precision, torch.float32)
    optimizer = optimizers.factory(config.optimizer, config.optimizer_args)
    with seeded(config.seed):
        model = models.build(config.model, config.model_args)
        if config.checkpoint is not None:
            checkpoints.load(model, config.checkpoint, trusted=config.trust_checkpoint)
        model = model.to(device, dtype if config.precision in _DTYPES else None)
        found = data(config, model, device, dtype)
    loss = _loss(config, found, device)
    _try_a_step(Setup(model, optimizer, loss, found.batches, 1, config.clip_norm, config.seed))
    resolved = replace(
        config,
        input_shape=None if found.inputs is None else found.inputs.shape,
        num_classes=found.classes,
        loss=config.loss or found.loss,
        device=str(device),
    )
    return Prepared(resolved, model, found.batches, loss, optimizer, found.notes)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).add(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name}: can't be used here: {said(error)}") from error
    return device


def _loss(config: Config, found: Data, device: torch.device) -> Loss:
    name = config.loss or found.loss
    loss = losses.own_loss if name is None else losses.named(name)
    if config.precision == "bf16-mixed":
        return losses.UnderAutocast(loss, device.type, torch.bfloat16)
    return loss


def _try_a_step(setup: Setup) -> None:
    """Train a copy for one step, so that a mismatch shows before anything long begins."""
    try:
        train(setup.fork())
    except UsageError:
        raise
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{said(error)}: give a smaller --batch-size or --input-shape") from error
    except Exception as error:
        raise UsageError(f"a training step on the first batch raised {said(error)}") from error
