"""One trial: a fork is trained and compared with the unchanged run."""

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
    """Train a fork and return the loss of each step's batch before the step.

    Raises:
        KeyboardInterrupt: the user interrupted the run.
    """
    course = train(fork)
    if course.interrupted:
        raise KeyboardInterrupt
    return tuple(course.losses)


def plain_losses(setup: Setup, record: Record) -> Losses:
    """Return the losses of the unchanged run with the steps of `setup`.

    The observed run is that run: forks begin with the same weights, and the monitor does not change
    them. If the record holds only a part of the run, it is run again.
    """
    losses = record.losses[: setup.steps]
    if len(losses) == setup.steps or (losses and not math.isfinite(losses[-1])):
        return losses
    return losses_of(setup.fork())


def at_the_end(losses: Sequence[float], steps: int) -> float:
    """Return the mean loss of the last quarter of the steps; infinite if the run diverged.

    A run diverged if it stopped early, or if it ends a thousand times above its start: the standard
    error of losses that grow without bound is not informative.
    """
    if len(losses) < steps or not np.isfinite(losses).all():
        return math.inf
    mean = float(np.mean(losses[-_quarter(steps) :]))
    return mean if mean <= _DIVERGED * max(abs(losses[0]), 1.0) else math.inf


def error_of_difference(without: Sequence[float], losses: Sequence[float], steps: int) -> float:
    """Return the standard error of the mean of `without − losses` over the last quarter.

    It is std(d)/√n of the n paired differences d; NaN if one of the runs diverged, or if there is
    only one step.
    """
    ended = [math.isfinite(at_the_end(run, steps)) for run in (without, losses)]
    n = _quarter(steps)
    if not all(ended) or n < 2:
        return math.nan
    differences = np.subtract(without[-n:], losses[-n:])
    return float(np.std(differences, ddof=1) / math.sqrt(n))


def error_of_mean(losses: Sequence[float], steps: int) -> float:
    """Return the standard error std/√n of the mean over the last quarter; NaN as above."""
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
    """Return the trial of a fix from its run, the plain run, and that at another learning rate."""
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
    """Return the loss of a constant prediction; None: unknown, or the loss need not fall."""
    return None if is_opposed(record) else record.chance


def _quarter(steps: int) -> int:
    """Return the number of steps of a quarter, at least two to judge their difference."""
    return min(steps, max(2, math.ceil(steps / 4)))
