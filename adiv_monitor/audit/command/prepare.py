"""From the options of an audit to its objects: model, batches, loss and optimizer."""

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from adiv_monitor.audit.options.config import Config
from adiv_monitor.audit.options.usage import blamed
from adiv_monitor.audit.run import loss_of_output
from adiv_monitor.audit.sources import checkpoints, models, named, script
from adiv_monitor.audit.sources.data import data
from adiv_monitor.audit.sources.own_losses import own_losses
from adiv_monitor.audit.training.setup import Loss, Setup, seeded
from adiv_monitor.audit.training.train import train

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # others: float32


def prepare(config: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Make everything that the config names, and try it with one training step of a copy.

    Returns:
        The arguments of `audit` that are objects, and notes that a reader of the report must know.

    Raises:
        UsageError: An option can't be used.
    """
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    with blamed(f"--device {config.device}: can't be used here"):
        device = torch.device(config.device or usual)
        torch.empty(1, device=device).add(1)
    with seeded(config.seed), script.watched(may_train=config.run_script) as ran:
        optimizer = named.optimizer(config.optimizer, config.optimizer_args)
        model = models.build(config.model, config.model_args)
        steps = ran.steps_of(model)
        trained = f"weights have been trained: {steps:,} steps during import" if steps else ""
        if config.checkpoint is not None:
            checkpoints.load(model, config.checkpoint, trusted=config.trust_checkpoint)
            trained = f"weights from {config.checkpoint}"
        dtype = _DTYPES.get(config.precision)
        model = model.to(device, dtype)
        if isinstance(optimizer, Optimizer):
            optimizer.load_state_dict(optimizer.state_dict())  # onto the model's device
        batches, fitting, notes = data(config, model, device, dtype or torch.float32)
        name = config.loss or fitting
        loss: Loss = named.loss(name) if name else loss_of_output
    if config.precision == "bf16-mixed":
        loss = partial(named.under_autocast, loss, device.type)
    with blamed("a training step on the first batch raised"):
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
