"""The attempt to overfit one small batch; if it fails, something is broken (A. Karpathy 2019)."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.concerned import passed
from adiv_monitor.audit.training.batches import first, mapped, size_of
from adiv_monitor.audit.training.setup import Setup, seeded
from adiv_monitor.audit.trials.fixes import DoesNotApply
from adiv_monitor.audit.trials.fixes.optimizer import scale_rate
from adiv_monitor.audit.trials.trial import (
    FOR_ONE_BATCH,
    NEVER,
    Cap,
    CapReached,
    affordable,
    best_rate,
    compared,
    losses_of,
    quarter,
)
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

SAMPLES = 16
STEPS = 100
FACTORS = (1.0, 3.0, 0.3)  # on the best learning rate for many batches
LEARNT = 0.5  # of the first loss: below it, no other learning rate is tried
# A loss couples samples if one sample changes gradients by more than CHANGED of their rms, in more
# than BEYOND times its own share of their entries.
CHANGED, BEYOND = 1e-3, 1.2
STANDS = 0.01  # of the first loss: a smaller fall between the last two quarters is none


def overfit(setup: Setup, record: Record, *, cap: Cap = NEVER) -> Trial | None:
    """Train a fork on one small batch, without dropout, at the best learning rate that was tried.

    Every step draws the same random numbers: noise that is drawn anew can't be learned.
    The batch is the first 16 samples of the first batch, or all of it if it can't be cut. If the
    fork does not overfit it, 3 and 0.3 times that learning rate are tried too, because the best
    learning rate for many batches may be wrong for one. If the loss couples samples, as a loss of
    their covariance does, few samples may leave a rest that more do not: the whole batch is tried
    second.

    Args:
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        cap: time by which the attempt ends.

    Returns:
        The best trial, whose `loss_without` is the first loss, and whose error is that of the mean
        of the last quarter; None if steps are too costly, or if there is no time.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    most = affordable(record, FOR_ONE_BATCH)
    steps = int(min(STEPS, most))
    if steps < FEWEST:
        return None
    batch = setup.batches[0]
    small = first(batch, SAMPLES)
    trials: list[Trial] = []
    attempts = [(small, factor) for factor in FACTORS]
    while attempts and (len(trials) + 1) * steps <= most:
        samples, factor = attempts.pop(0)
        small_setup = replace(setup, batches=(samples,), steps=steps)
        try:
            cap.check(record, steps)
            trials.append(_trial(small_setup, factor * best_rate(record.rates)))
        except (CapReached, DoesNotApply):  # no time, or no learning rate
            break
        except Exception:
            if samples is batch:
                raise
            attempts = [(batch, factor) for factor in FACTORS]  # the batch can't be cut
            continue
        if trials[-1].loss < LEARNT * trials[-1].loss_without:
            break
        if len(trials) == 1 and samples is not batch and couples(setup, samples):
            attempts.insert(0, (batch, FACTORS[0]))
    best = min(trials, key=lambda trial: trial.loss, default=None)
    return None if best is None else replace(best, runs=len(trials))


def couples(setup: Setup, batch: Any) -> bool:
    """Return whether one sample changes the loss's gradients at the outputs of others.

    Dropout is off, and batch normalisations, which couple samples too, are in evaluation mode.
    """
    size = size_of(batch)

    def exchanged(x: Tensor) -> Tensor:
        return torch.cat([x[1:2], x[1:]]) if x.ndim and len(x) == size else x

    try:
        own, other = (passed(setup, x).gradients for x in (batch, mapped(batch, exchanged)))
    except Exception:  # the loss has no such gradients
        return False
    if own.shape != other.shape:
        return False
    changes = (own - other).abs() > CHANGED * own.square().mean().sqrt()
    return int(changes.sum()) * size > BEYOND * len(own)


def _trial(setup: Setup, rate: float) -> Trial:
    fork = setup.fork()
    if rate != 1:
        scale_rate(fork.optimizer, rate)
    for module in fork.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    loss = fork.loss

    def as_first(model: nn.Module, batch: object) -> Tensor:
        with seeded(setup.seed):
            return loss(model, batch)

    fork.loss = as_first
    losses, n = losses_of(fork), quarter(setup.steps)
    found = compared("overfit", losses, losses[:1] * setup.steps, setup.steps)
    falls = False
    if math.isfinite(found.loss):
        fell = float(np.mean(losses[-2 * n : -n])) - found.loss
        falls = fell > max(2 * found.error, STANDS * abs(losses[0]))
    return replace(found, loss_without=losses[0], rate=rate, falls=falls)
