"""One audit: the run of a copy, its diagnosis, and the trials of other rates and fixes."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adiv_monitor.audit import trials
from adiv_monitor.audit.experiments.observe import observe
from adiv_monitor.audit.experiments.state import counted
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training import batches as drawn
from adiv_monitor.audit.training import setup as settings
from adiv_monitor.audit.training.setup import COSTLY, Setup, seeded
from adiv_monitor.audit.training.train import Progress, silent
from adiv_monitor.diagnosis import diagnose
from adiv_monitor.diagnosis.course import course, end, note_on_own_losses, start
from adiv_monitor.diagnosis.record import Record

# Without a given number of steps, a run has as many as cost no more than `MOST_STEPS` steps that
# are not costly; and a step whose number is a multiple of `EVERY` is measured.
FEWEST_STEPS, MOST_STEPS, EVERY = 24, 60, 6
LEARNT = 0.1  # of the first loss, or of a constant prediction's: no learning rate hinders this run


def run(given: Mapping[str, Any]) -> AuditReport:
    """Run an audit with the arguments of `audit`."""
    of = SimpleNamespace(**given)
    steps, most = of.steps, of.steps or MOST_STEPS
    batches, notes = of.batches, list[str]()
    loss = settings.loss_of_output if of.loss is None else settings.of_batch(of.loss)
    facts: dict[str, Any] = {"data": drawn.in_words(batches), "loss": settings.name_of(of.loss)}
    facts |= of._facts or {}
    if drawn.is_data_set(batches):
        batches = drawn.loader_of(batches, drawn.DEFAULT_SIZE, of.seed)
        notes.append(f"The data set was shuffled, in batches of {drawn.DEFAULT_SIZE}: give a "
                     "DataLoader for batches as your loop has them.")  # fmt: skip
    with warnings.catch_warnings(), seeded(of.seed):
        with drawn.as_drawn(batches):
            kept = drawn.taken(batches, most, next(of.model.parameters()).device)
        setup = Setup(of.model, of.optimizer or adamw, loss, kept, most, of.clip_norm, of.seed)
        cost, differentiates = counted(setup)
        warnings.simplefilter("ignore")  # this pass has shown them
        if steps is None:
            most = max(FEWEST_STEPS, int(MOST_STEPS * min(1.0, COSTLY / cost)))
            if most < MOST_STEPS:
                notes.append(f"A step is costly, so the copy took {most} of them instead of "
                             f"{MOST_STEPS}: give a number of steps for more.")  # fmt: skip
        setup = replace(setup, steps=most, cost=cost, differentiates=differentiates)
        every = of.every_n_steps or (EVERY if steps is None else max(1, steps // 10))
        progress = of.progress or silent
        record = observe(setup, every_n_steps=every, max_rows=of.max_rows, progress=progress)
        own = of.own_losses or ()
        by_step = own.items() if isinstance(own, Mapping) else enumerate(own)
        record = replace(
            record,
            facts=replace(record.facts, **facts),
            trained=record.trained or bool(facts.get("trained")),
            own_losses={int(step): float(x) for step, x in by_step},
        )
        notes += [*record.notes, *filter(None, [note_on_own_losses(record)])]
        why = "" if of.try_fixes else "trials are off"
        return _report(setup, replace(record, notes=tuple(notes)), why, progress)


def _report(setup: Setup, record: Record, why: str, progress: Progress) -> AuditReport:
    """Diagnose a record, and try other learning rates and fixes; an interrupt ends that.

    Nothing is tried if `why` says why not, or if runs can't be compared.
    """
    if record.interrupted:
        why = "interrupted"
    elif not record.repeats or record.moving_targets:
        why = "runs can't be compared"
    elif not why and _is_settled(setup, record):
        why = "the loss is learnt, and steps are costly"
    try:
        if not why:
            rates = trials.rate_trials(setup, record, progress=progress)
            record = replace(record, rates=rates)
            record = replace(record, overfit=trials.overfit(setup, record))
            findings = trials.tried(diagnose(record), setup, record, progress=progress)
            return AuditReport(findings, record)
    except KeyboardInterrupt:
        record, why = replace(record, interrupted=True), "interrupted"
    if record.interrupted:
        note = "The audit was interrupted, so not all fixes were tried."
        record = replace(record, notes=(*record.notes, note))
    return AuditReport(trials.untried(diagnose(record), why), record)


def _is_settled(setup: Setup, record: Record) -> bool:
    """Return whether steps are costly, and there is nothing that a learning rate could explain."""
    learnt = course(record) == "falls" and 0 <= end(record) < LEARNT * start(record)
    return setup.is_costly and learnt and all(f.strength == "note" for f in diagnose(record))


def adamw(model: nn.Module) -> Optimizer:
    """Return the default optimizer for a model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # The fused step takes a sixth of the time of a processor; it takes no complex numbers.
    fused = all(p.is_floating_point() for p in trained) or None
    return torch.optim.AdamW(trained, lr=1e-3, fused=fused)
