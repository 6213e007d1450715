"""One audit: the run of a copy, its diagnosis, and the trials of other rates and fixes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.audit import trials
from adiv_monitor.audit.arguments import check_numbers, check_training
from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.batches import (
    DEFAULT_SIZE,
    as_drawn,
    called,
    in_words,
    is_data_set,
    is_drawn_anew,
    loader_of,
    taken,
)
from adiv_monitor.audit.training.setup import (
    Loss,
    OptimizerFactory,
    Setup,
    differentiates,
    seeded,
)
from adiv_monitor.audit.training.target_loss import TargetLoss, name_of, takes_outputs
from adiv_monitor.audit.training.train import Progress, each_warning_once
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import compared
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Record


def run(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None,
    optimizer: Optimizer | OptimizerFactory | None,
    steps: int,
    every_n_steps: int | None,
    max_rows: int | None,
    clip_norm: float | None,
    realised: bool,
    attention: bool,
    alignment: bool,
    try_fixes: bool,
    try_seconds: float,
    seed: int,
    own_losses: Mapping[int, float] | Sequence[float] | None,
    progress: Progress | None,
    _facts: Mapping[str, str] | None,
) -> AuditReport:
    """Run an audit; see `audit`."""
    check_training(model, loss, optimizer)
    check_numbers(
        steps=steps,
        every_n_steps=every_n_steps,
        max_rows=max_rows,
        clip_norm=clip_norm,
        seed=seed,
        try_seconds=try_seconds,
    )
    name = "" if loss is None else name_of(loss)
    facts: dict[str, Any] = {"data": in_words(batches), "loss": name, **(_facts or {})}
    if loss is not None and takes_outputs(loss):
        loss = TargetLoss(name, loss)  # type: ignore[arg-type]
    notes = []
    if is_data_set(batches):
        batches = loader_of(batches, DEFAULT_SIZE, seed)
        notes.append(f"The data set was shuffled, in batches of {DEFAULT_SIZE}: give a DataLoader "
                     "for batches as your loop has them.")  # fmt: skip
    with each_warning_once(), seeded(seed):
        with as_drawn(batches):
            kept = taken(batches, steps, next(model.parameters()).device)
        setup = Setup(
            model, optimizer or adamw, loss or loss_of_output, kept, steps, clip_norm, seed
        )
        setup = replace(setup, differentiates=differentiates(setup))
        record = observe(
            setup,
            every_n_steps=every_n_steps or max(1, steps // 10),
            max_rows=max_rows,
            realised=realised,
            attention=attention,
            alignment=alignment,
            progress=progress,
        )
        record = replace(
            record,
            facts=replace(record.facts, **facts),
            notes=(*notes, *record.notes),
            trained=record.trained or bool(facts.get("trained")),
        )
        record = _beside(record, own_losses, drawn_anew=is_drawn_anew(batches))
        cap = trials.Cap(try_seconds) if try_fixes and try_seconds > 0 else None
        return _report(setup, record, cap, progress or trials.silent)


def _beside(
    record: Record, losses: Mapping[int, float] | Sequence[float] | None, *, drawn_anew: bool
) -> Record:
    """Return the record with the losses of the user's own run, and notes on the comparison."""
    by_step = losses if isinstance(losses, Mapping) else dict(enumerate(losses or ()))
    record = replace(record, own_losses={int(s): float(x) for s, x in by_step.items()})
    order = ["the loader draws another order of batches from torch's generator"] * drawn_anew
    notes = (*(f"{said.capitalize()}." for said in order), compared(record))
    return replace(
        record,
        notes=(*record.notes, *filter(None, notes)),
        lost=(*record.lost, *(order if by_step else ())),
    )


def _report(
    setup: Setup, record: Record, cap: trials.Cap | None, progress: Progress
) -> AuditReport:
    """Diagnose a record, and try other learning rates and fixes; an interrupt ends that.

    Nothing is tried without a cap, or if runs can't be compared.
    """
    findings: tuple[Finding, ...] = ()
    compares = record.repeats and not record.moving_targets
    try:
        if cap is not None and compares and not record.interrupted:
            rates = trials.rate_trials(setup, record, cap=cap, progress=progress)
            record = replace(record, rates=rates)
            record = replace(record, overfit=trials.overfit(setup, record, cap=cap))
            findings = trials.tried(diagnose(record), setup, record, cap=cap, progress=progress)
            record = replace(record, hurried=cap.reached)
        elif not record.interrupted:
            off = "trials are off" if compares else "runs can't be compared"
            findings = trials.untried(diagnose(record), off)
    except KeyboardInterrupt:
        record = replace(record, interrupted=True)
    if record.interrupted or any(a.untried == "interrupted" for f in findings for a in f.advice):
        note = "The audit was interrupted, so not all fixes were tried."
        record = replace(record, interrupted=True, notes=(*record.notes, note))
    return AuditReport(findings or diagnose(record), record)


def adamw(model: nn.Module) -> Optimizer:
    """Return the default optimizer for a model."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself returns, as models of Hugging Face do.

    Raises:
        TypeError: the model's output has no loss, or the model does not accept the batch.
    """
    name = type(model).__name__
    try:
        output = called(model, batch)
    except TypeError as error:
        raise TypeError(
            f"audit(loss=None): {name} can't take the whole batch ({error}), expected a model that "
            "gives its own loss: give audit a loss, (model, batch) → number"
        ) from error
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        got = type(output).__name__ + (" whose loss is None" if hasattr(output, "loss") else "")
        raise TypeError(
            f"audit(loss=None): {name} gave {got}, expected an object with the loss as its `loss`, "
            "or a dict with it: give audit a loss, (model, batch) → number, or batches that hold "
            "what the model computes its loss from, such as labels"
        )
    return loss
