"""Can the model overfit one small batch? If not, something is broken (A. Karpathy 2019)."""

import math
from dataclasses import replace

import numpy as np
from torch import nn

from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup
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
FACTORS = (1.0, 3.0, 0.3)  # on the best rate of many batches
LEARNT = 0.5  # of the first loss: no other rate need be tried
STANDS = 0.01  # of the first loss: what falls less from one quarter of the steps to the next


def overfit(
    setup: Setup, record: Record, *, cost: float = FOR_ONE_BATCH, cap: Cap | None = None
) -> Trial | None:
    """A fork learns one small batch, without dropout, at the best learning rate that was tried.

    The batch is the first 16 samples of the first one, or all of it, where it can't be cut. Where
    it is not learnt, three times and 0.3 times that rate are tried too: a rate that is right for
    many batches may be wrong for one.

    Args:
        setup: what is trained.
        record: of the run as it is, with `rates` where they were tried.
        cost: what it may cost, of steps that cost as much as those of a whole batch.
        cap: the time by which it ends; None: there is none.

    Returns:
        The best trial, whose `loss_without` is the first loss, and whose error is that of the mean
        of the last quarter; None where steps are too costly, or there is no time.

    Raises:
        KeyboardInterrupt: the keyboard ended the run.
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
        except (CapReached, DoesNotApply):  # there is no time, or the optimizer has no rate
            break
        except Exception:
            if small is batch:
                raise
            small = batch  # it can't be cut
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
    return fork
