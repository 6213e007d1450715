"""Losses and errors of the fault benchmark's runs."""

import math
from collections.abc import Sequence

from audit.fault_benchmark.run import STEPS, Case, Healthy, error

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


def course(bed: Case | Healthy, seed: int) -> dict[str, float]:
    """Return loss and error after as many steps as an audit takes, without an audit."""
    run = bed.build(seed)
    fork = run.setup(STEPS, seed).fork()
    losses = losses_of(fork)
    return {
        "first": losses[0],
        "loss": at_the_end(losses, STEPS),
        "error": error(fork.model, run.batches[-16:]),
    }
