"""One trial: a fork is trained, and compared with the run as it is."""

import math
from collections.abc import Sequence

import numpy as np

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.course import is_opposed
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

Losses = tuple[float, ...]

_DIVERGED = 1e3


def losses_of(fork: Fork) -> Losses:
    """Train a fork: the loss of each step's batch before the step.

    Raises:
        KeyboardInterrupt: the keyboard ended the run.
    """
    course = train(fork)
    if course.interrupted:
        raise KeyboardInterrupt
    return tuple(course.losses)


def plain_losses(setup: Setup, record: Record) -> Losses:
    """The losses of the run as it is, whose steps are those of `setup`.

    The observed run is that run: forks begin alike, and the monitor changes no bit of them. It is
    run again where the record holds only a part of it.
    """
    losses = record.losses[: setup.steps]
    if len(losses) == setup.steps or (losses and not math.isfinite(losses[-1])):
        return losses
    return losses_of(setup.fork())


def at_the_end(losses: Sequence[float], steps: int) -> float:
    """Mean loss of the last quarter of the steps; infinite where the run diverged.

    It did where it did not get there, and where it ends a thousand times above where it began: the
    differences of losses that grow without bound tell nothing of their own error.
    """
    if len(losses) < steps or not np.isfinite(losses).all():
        return math.inf
    mean = float(np.mean(losses[-_quarter(steps) :]))
    return mean if mean <= _DIVERGED * max(abs(losses[0]), 1.0) else math.inf


def error_of_difference(without: Sequence[float], losses: Sequence[float], steps: int) -> float:
    """Standard error of the mean of `without − losses` over the last quarter of the steps.

    std(d)/√n of the n paired differences d; NaN where one of the runs diverged, or there is
    one step only.
    """
    ended = [math.isfinite(at_the_end(run, steps)) for run in (without, losses)]
    n = _quarter(steps)
    if not all(ended) or n < 2:
        return math.nan
    differences = np.subtract(without[-n:], losses[-n:])
    return float(np.std(differences, ddof=1) / math.sqrt(n))


def error_of_mean(losses: Sequence[float], steps: int) -> float:
    """Standard error of the mean over the last quarter of the steps: std/√n; NaN as above."""
    n = _quarter(steps)
    if not math.isfinite(at_the_end(losses, steps)) or n < 2:
        return math.nan
    return float(np.std(losses[-n:], ddof=1) / math.sqrt(n))


def compared(
    fix: str,
    losses: Sequence[float],
    without: Sequence[float],
    steps: int,
    by_rate: Trial | None = None,
) -> Trial:
    """What a fix's run gave, beside the run as it is, and that at another learning rate."""
    error = error_of_mean(losses, steps)
    return Trial(
        fix=fix,
        steps=steps,
        loss=at_the_end(losses, steps),
        loss_without=at_the_end(without, steps),
        loss_by_rate=None if by_rate is None else by_rate.loss,
        error=error_of_difference(without, losses, steps),
        loss_error=error,
        error_by_rate=math.nan if by_rate is None else math.hypot(error, by_rate.loss_error),
    )


def constant_loss(record: Record) -> float | None:
    """The loss of a constant prediction; None: not known, or the loss need not fall below it."""
    return None if is_opposed(record) else record.chance


def _quarter(steps: int) -> int:
    """How many steps a quarter is; two at least, so that their difference can be judged."""
    return min(steps, max(2, math.ceil(steps / 4)))
