"""Losses of the fault benchmark's runs."""

import math
from collections.abc import Sequence

from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.training.train import train


def at_the_end(losses: Sequence[float], steps: int) -> float:
    """Return the mean loss of the last quarter of the steps; infinite if it was not reached."""
    quarter = losses[-(steps // 4) :]
    ended = len(losses) == steps and all(map(math.isfinite, losses))
    return sum(quarter) / len(quarter) if ended else math.inf


def losses_of(fork: Fork) -> list[float]:
    course = train(fork)
    if course.interrupted:
        raise KeyboardInterrupt
    return course.losses
