"""The audit: train a copy, say what is wrong with it, and try what would mend it."""

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.arguments import DEFAULT_MAX_ROWS
from adiv_monitor.audit import batches as batches_
from adiv_monitor.audit.observe import Progress, observe
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.setup import Loss, OptimizerFactory, Setup, seeded


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    steps: int = 60,
    every_n_steps: int | None = None,
    max_rows: int | None = DEFAULT_MAX_ROWS,
    clip_norm: float | None = None,
    realised: bool = False,
    attention: bool = False,
    try_mends: bool = True,
    what_if: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Train a copy of a model for some steps, and say what is wrong with its training.

    The model, the optimizer, the batches and random numbers are as they were afterwards.

    Args:
        model: the model, as training would begin with it. Copies of it are trained.
        batches: an iterable of batches; as many are taken as there are steps, and if there are
            fewer, they are repeated.
        loss: (model, batch) → the loss, one number. None: the model gives an object that has the
            loss as its `loss`, called as `model(**batch)`, `model(*batch)` or `model(batch)`.
        optimizer: over the model's parameters, with learning rates as they are to be tested; or
            what makes one for a model. None: AdamW of learning rate 1e-3.
        steps: how many to train, at least 1.
        every_n_steps: each step whose number is a multiple of this is measured; None: a tenth of
            the steps.
        max_rows: rows to look at per layer and step; None: all of them.
        clip_norm: largest norm of the gradient; None: it is not clipped.
        realised: measure what each step really did to the activations, too.
        attention: measure what each step did to attention scores, too.
        try_mends: try what would mend the run, and other learning rates, in short runs.
        what_if: say how the steps of layers would be with other maps or inputs.
        seed: of the run's random numbers.
        progress: called with (what is done, how far, of how much).

    Raises:
        TypeError, ValueError: an argument is not what is expected; the message says what is.
    """
    every_n_steps = max(1, steps // 10) if every_n_steps is None else every_n_steps
    device = next(model.parameters()).device
    with seeded(seed):
        kept = batches_.taken(batches, steps, device)
    setup = Setup(model, optimizer or adamw, loss or loss_of_output, kept, steps, clip_norm, seed)
    record, interrupted = observe(
        setup,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        realised=realised,
        attention=attention,
        progress=progress,
    )
    trials = _room("trials") if try_mends and not interrupted else None
    if trials is not None:
        rates = trials.rate_trials(setup, record)
        record = replace(record, rates=rates, overfit=trials.overfit(setup, record))
    diagnosis = _room("diagnosis")
    findings = () if diagnosis is None else diagnosis.diagnose(record)
    if trials is not None:
        findings = trials.tried(findings, setup, record, progress=progress)
    whatif = _room("what_if") if what_if and not interrupted else None
    if whatif is not None and hasattr(whatif, "what_if"):
        return AuditReport(findings, record, whatif.what_if(setup, max_rows=max_rows))
    return AuditReport(findings, record)


def adamw(model: nn.Module) -> Optimizer:
    """What trains a model that no optimizer is given for."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself gives, as models of Hugging Face do."""
    output = batches_.called(model, batch)
    loss: Tensor = output.loss
    return loss


def _room(name: str) -> Any:
    """A part of the audit; None where it is not there yet."""
    path = f"adiv_monitor.audit.{name}"
    return importlib.import_module(path) if importlib.util.find_spec(path) else None
