"""The attempt to overfit one small batch; if it fails, something is broken (A. Karpathy 2019)."""

import math
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.trials.budget import FOR_ONE_BATCH, Cap, CapReached, step_cost
from adiv_monitor.audit.trials.fixes import DoesNotApply
from adiv_monitor.audit.trials.fixes.rates import scale_rate
from adiv_monitor.audit.trials.rates import best_rate
from adiv_monitor.audit.trials.trial import at_the_end, losses_of
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

SAMPLES = 16
STEPS = 100
FACTORS = (1.0, 3.0, 0.3)  # on the best learning rate for many batches
LEARNT = 0.5  # of the first loss: below it, no other learning rate is tried
STANDS = 0.01  # of the first loss: a smaller fall between the last two quarters is none


def overfit(
    setup: Setup, record: Record, *, cost: float = FOR_ONE_BATCH, cap: Cap | None = None
) -> Trial | None:
    """Train a fork on one small batch, without dropout, at the best learning rate that was tried.

    Every step draws the same random numbers: noise that is drawn anew can't be learned.
    The batch is the first 16 samples of the first batch, or all of it if it can't be cut. If the
    fork does not overfit it, 3 and 0.3 times that learning rate are tried too, because the best
    learning rate for many batches may be wrong for one.

    Args:
        setup: training setup.
        record: record of the unchanged run, with `rates` if learning rates were tried.
        cost: largest cost, in steps that cost as much as those of a whole batch.
        cap: time by which the attempt ends; None: unlimited.

    Returns:
        The best trial, whose `loss_without` is the first loss, and whose error is that of the mean
        of the last quarter; None if steps are too costly, or if there is no time.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    each = step_cost(record)
    affordable = cost / each if each else math.inf
    cap = Cap() if cap is None else cap
    steps = int(min(STEPS, affordable))
    if steps < FEWEST:
        return None
    batch = setup.batches[0]
    small = first(batch, SAMPLES)
    trials: list[Trial] = []
    factors = FACTORS[: int(min(len(FACTORS), affordable // steps))]
    for factor in factors:
        rate = factor * best_rate(record.rates)
        try:
            cap.check(record, steps)
            trials.append(_trial(setup, small, steps, rate))
        except (CapReached, DoesNotApply):  # no time, or no learning rate
            break
        except Exception:
            if small is batch:
                raise
            small = batch  # the batch can't be cut
            trials.append(_trial(setup, small, steps, rate))
        if trials[-1].loss < LEARNT * trials[-1].loss_without:
            break
    if not trials:
        return None
    return replace(min(trials, key=lambda trial: trial.loss), runs=len(trials))


def _trial(setup: Setup, batch: object, steps: int, rate: float) -> Trial:
    losses = losses_of(_fork(setup, batch, steps, rate))
    ended = math.isfinite(at_the_end(losses, steps))
    n = max(2, math.ceil(steps / 4))
    quarter, before = np.array(losses[-n:]), np.array(losses[-2 * n : -n])
    error = float(quarter.std(ddof=1) / math.sqrt(n)) if ended else math.nan
    fell = float(before.mean() - quarter.mean()) if ended else 0.0
    return Trial(
        fix="overfit",
        steps=steps,
        loss=at_the_end(losses, steps),
        loss_without=losses[0],
        loss_by_rate=None,
        error=error,
        rate=rate,
        falls=fell > max(2 * error, STANDS * abs(losses[0])),
    )


def _fork(setup: Setup, batch: object, steps: int, rate: float) -> Fork:
    fork = replace(setup, batches=(batch,), steps=steps).fork()
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
    return fork
