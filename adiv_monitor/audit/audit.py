"""The audit: trains a copy of a model, finds faults in its training, and tries fixes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.arguments import DEFAULT_MAX_ROWS
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
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.own_run import compared
from adiv_monitor.diagnosis.record import Record


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
    alignment: bool = False,
    try_fixes: bool = True,
    try_seconds: float = math.inf,
    seed: int = 0,
    own_losses: Mapping[int, float] | Sequence[float] | None = None,
    progress: Progress | None = None,
    _facts: Mapping[str, str] | None = None,
) -> AuditReport:
    """Train a copy of a model for some steps, and report faults of its training.

    The model, the optimizer, the batches and random numbers are unchanged afterwards.

    Args:
        model: the model in the state in which training would begin. Copies of it are trained.
        batches: an iterable of batches; one is taken for each step, and if there are fewer, they
            are repeated. A data set of samples is shuffled, in batches of 16.
        loss: function (model, batch) → the loss, one number; or a loss (output, target) → number,
            such as `nn.CrossEntropyLoss()`, whose second parameter is named so: the model is called
            with all parts of a batch but the last, which is the target. None: the model returns an
            object with the loss as its `loss`, called as `model(**batch)`, `model(*batch)` or
            `model(batch)`.
        optimizer: optimizer of the model's parameters, with the learning rates to test, or a
            function that makes one for a model. None: AdamW with learning rate 1e-3.
        steps: number of training steps, at least 1.
        every_n_steps: each step whose number is a multiple of this is measured; None: a tenth of
            the steps.
        max_rows: number of rows to sample per layer and step; None: all of them.
        clip_norm: largest norm of the gradient; None: it is not clipped.
        realised: whether to also measure the actual change of the activations in each step.
        attention: whether to also measure the effect of each step on attention scores.
        alignment: whether to also measure the alignment of weights, updates and activations, with
            the first batch as the probe.
        try_fixes: whether to try fixes and other learning rates in short runs.
        try_seconds: no trial begins that would end later than this many seconds after the first
            one. If that leaves a trial out, the result depends on the clock, and the verdict says
            so. Without this limit it does not: number and length of trials follow from the number
            of steps and from the cost of a step (`record.facts.step_cost`).
        seed: seed of the run's random numbers.
        own_losses: losses of your own run: those of its steps 0, 1, 2, …, or step → loss. The
            verdict says if the copy behaves otherwise.
        progress: called with (name of the part, units done, units in all).

    Raises:
        TypeError, ValueError: an argument is not as expected; the message says what is expected.
    """
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
