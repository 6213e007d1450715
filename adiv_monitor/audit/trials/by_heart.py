"""Can the model learn one small batch by heart? If not, something is broken (A. Karpathy 2019)."""

import math
from dataclasses import replace

import numpy as np
from torch import nn

from adiv_monitor.audit.finding import Trial
from adiv_monitor.audit.record import Record
from adiv_monitor.audit.setup import Fork, Setup
from adiv_monitor.audit.trials.budget import FEWEST, step_seconds
from adiv_monitor.audit.trials.mends.rates import scale_rate
from adiv_monitor.audit.trials.rates import best_rate
from adiv_monitor.audit.trials.samples import first
from adiv_monitor.audit.trials.trial import at_the_end, losses_of

SAMPLES = 16
STEPS = 100


def overfit(setup: Setup, record: Record, *, seconds: float = 10.0) -> Trial | None:
    """A fork learns one small batch, without dropout, at the best learning rate that was tried.

    The batch is the first 16 samples of the first one, or all of it, where it can't be cut.

    Args:
        setup: what is trained.
        record: of the run as it is, with `rates` where they were tried.
        seconds: roughly how long it may take, of steps that take as long as a whole batch.

    Returns:
        A trial whose `loss_without` is the first loss, and whose error is that of the mean of the
        last quarter; None where steps are too slow.

    Raises:
        KeyboardInterrupt: the keyboard ended the run.
    """
    each = step_seconds(record)
    steps = STEPS if each == 0 else min(STEPS, int(min(seconds / each, STEPS)))
    if steps < FEWEST:
        return None
    batch = setup.batches[0]
    rate = best_rate(record.rates)
    small = first(batch, SAMPLES)
    try:
        losses = losses_of(_fork(setup, small, steps, rate))
    except Exception:
        if small is batch:
            raise
        losses = losses_of(_fork(setup, batch, steps, rate))  # it can't be cut
    quarter = np.array(losses[-max(2, math.ceil(steps / 4)) :])
    ended = math.isfinite(at_the_end(losses, steps))
    return Trial(
        mend="overfit",
        steps=steps,
        loss=at_the_end(losses, steps),
        loss_without=losses[0],
        loss_by_rate=None,
        error=float(quarter.std(ddof=1) / math.sqrt(len(quarter))) if ended else math.nan,
        rate=rate,
    )


def _fork(setup: Setup, batch: object, steps: int, rate: float) -> Fork:
    fork = replace(setup, batches=(batch,), steps=steps).fork()
    if rate != 1:
        scale_rate(fork.optimizer, rate)
    for module in fork.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return fork
