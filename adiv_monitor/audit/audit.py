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
    every_n_steps = max(1, steps // 10) if every_n_steps is None else every_n_steps
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
            every_n_steps=every_n_steps,
            max_rows=max_rows,
            realised=realised,
            attention=attention,
            alignment=alignment,
            progress=progress,
        )
        known = replace(record.facts, **facts)
        record = replace(
            record,
            facts=known,
            notes=(*notes, *record.notes),
            trained=record.trained or bool(known.trained),
        )
        record = _beside(record, own_losses, drawn_anew=is_drawn_anew(batches))
        tries = try_fixes and try_seconds > 0 and record.repeats and not record.moving_targets
        cap = trials.Cap(try_seconds) if tries else None
        return _Diagnosis(setup, record, progress).report(cap)


def _beside(
    record: Record, losses: Mapping[int, float] | Sequence[float] | None, *, drawn_anew: bool
) -> Record:
    """Return the record with the losses of the user's own run, and notes on the comparison."""
    if drawn_anew:
        order = "the loader draws another order of batches from torch's generator"
        record = replace(record, notes=(*record.notes, f"{order.capitalize()}."))
        if losses is not None:
            record = replace(record, lost=(*record.lost, order))
    if losses is None:
        return record
    by_step = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
    record = replace(record, own_losses={int(s): float(x) for s, x in by_step.items()})
    said = compared(record)
    return replace(record, notes=(*record.notes, said) if said else record.notes)


class _Diagnosis:
    """The diagnosis of a record; after a keyboard interrupt it holds the results so far."""

    def __init__(self, setup: Setup, record: Record, progress: Progress | None) -> None:
        self._setup = setup
        self._record = record
        self._progress = progress or trials.silent
        self._findings: tuple[Finding, ...] = ()

    def report(self, cap: trials.Cap | None) -> AuditReport:
        """Return the report; without a cap, or after an interrupted run, nothing is tried."""
        try:
            if not self._record.interrupted:
                self._run(cap)
        except KeyboardInterrupt:
            self._record = replace(self._record, interrupted=True)
        if cap is not None and cap.reached:
            self._record = replace(self._record, hurried=True)
        if self._record.interrupted:
            note = "The audit was interrupted, so not all fixes were tried."
            self._record = replace(self._record, notes=(*self._record.notes, note))
        return AuditReport(self._findings or diagnose(self._record), self._record)

    def _run(self, cap: trials.Cap | None) -> None:
        setup, progress = self._setup, self._progress
        if cap is not None:
            rates = trials.rate_trials(setup, self._record, cap=cap, progress=progress)
            self._record = replace(self._record, rates=rates)
            overfit = trials.overfit(setup, self._record, cap=cap)
            self._record = replace(self._record, overfit=overfit)
        self._findings = diagnose(self._record)
        if cap is None:
            compares = self._record.repeats and not self._record.moving_targets
            off = "trials are off" if compares else "runs can't be compared"
            self._findings = trials.untried(self._findings, off)
        else:
            self._findings = trials.tried(
                self._findings, setup, self._record, cap=cap, progress=progress
            )
            untried = {a.untried for finding in self._findings for a in finding.advice}
            if "interrupted" in untried:
                raise KeyboardInterrupt


def adamw(model: nn.Module) -> Optimizer:
    """Return the default optimizer for a model."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that the model itself returns, as models of Hugging Face do.

    Raises:
        TypeError: the model's output has no loss, or the model does not accept the batch.
    """
    try:
        output = called(model, batch)
    except TypeError as error:
        raise TypeError(
            f"audit(loss=None): {type(model).__name__} can't take the whole batch ({error}), "
            "expected a model that gives its own loss: give audit a loss, (model, batch) → number"
        ) from error
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        got = type(output).__name__ + (" whose loss is None" if hasattr(output, "loss") else "")
        raise TypeError(
            f"audit(loss=None): {type(model).__name__} gave {got}, expected an object with the "
            "loss as its `loss`, or a dict with it: give audit a loss, (model, batch) → number, "
            "or batches that hold what the model computes its loss from, such as labels"
        )
    return loss
