"""One trial: forks are trained with a fix and compared with the run as it is."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.audit.trials.fixes import Fix
from adiv_monitor.audit.trials.fixes.optimizer import scale_rate
from adiv_monitor.diagnosis.course import FEWEST, is_opposed
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

Losses = tuple[float, ...]

# Largest costs of the trials of learning rates, of one batch and of fixes, in the unit of
# `Facts.step_cost`: together some 120 steps of a ResNet-18 on 16 images of 64 × 64.
FOR_RATES, FOR_ONE_BATCH, FOR_FIXES = 28.0, 8.0, 16.0
_DIVERGED = 1e3
# One step in both directions, then on in the better one while it gets better: at most five runs,
# as many as the unchanged model had.
_UP, _DOWN = (3.0, 10.0, 100.0), (0.3, 0.1, 0.01)


def silent(part: str, done: int, units: int) -> None:
    """Report no progress."""


class CapReached(Exception):
    """Raised if a run would end after the time that trials have."""


class Cap:
    """The time on the clock by which all trials end.

    Attributes:
        reached: whether a run was left out because it would have ended later.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.perf_counter() + seconds
        self.reached = False

    def check(self, record: Record, steps: int) -> None:
        """Raise CapReached if a run of this many steps, at the observed speed, would end later."""
        each = record.facts.seconds_per_step
        takes = 0.0 if math.isnan(each) else steps * each
        if time.perf_counter() + takes > self._end:
            self.reached = True
            raise CapReached


NEVER = Cap()


@dataclass
class Bench:
    """The state that the trials of one kind share.

    Attributes:
        setup: the training setup, with as many steps as each run has.
        record: record of the unchanged run.
        cap: time by which runs must end.
        left: cost that further runs may have.
    """

    setup: Setup
    record: Record
    cap: Cap = NEVER
    left: float = math.inf

    def __post_init__(self) -> None:
        self.without = plain_losses(self.setup, self.record)

    def trial(self, fix: Fix, layers: Sequence[str]) -> Trial:
        """Train forks with the fix: at the run's learning rate, and at others if it rescales.

        Raises:
            CapReached: there is no time for one run.
            DoesNotApply: the fix has nothing to change.
            KeyboardInterrupt: the user interrupted a run.
        """
        runs = {1.0: self.losses(fix, layers)}

        def best() -> float:
            return min(runs, key=lambda factor: at_the_end(runs[factor], self.setup.steps))

        def at(factor: float) -> None:
            if self.may_run:
                with suppress(CapReached):
                    runs[factor] = self.losses(fix, layers, factor)

        if fix.rescales:
            at(_UP[0])
            at(_DOWN[0])
            for here, further in (*pairwise(_UP), *pairwise(_DOWN)):
                if here in runs and best() == here:
                    at(further)
        by_rate = min(self.record.rates.values(), key=lambda trial: trial.loss, default=None)
        found = self.compared(fix.name, runs[best()], by_rate)
        return replace(found, rate=best(), runs=len(runs))

    def compared(self, name: str, losses: Losses, by_rate: Trial | None = None) -> Trial:
        """Return the trial of a fix from the losses of its run."""
        found = compared(name, losses, self.without, self.setup.steps, by_rate)
        return replace(found, constant=constant_loss(self.record))

    @property
    def may_run(self) -> bool:
        """Whether the cost of one more run is left."""
        return self.setup.steps * step_cost(self.record) <= self.left

    def losses(self, fix: Fix, layers: Sequence[str] = (), factor: float = 1.0) -> Losses:
        """Return the losses of a run with the fix and another learning rate; raises as `trial`."""
        fork = self.setup.fork()
        fix.apply(fork, layers, self.record)
        if factor != 1:
            scale_rate(fork.optimizer, factor)
        self.cap.check(self.record, self.setup.steps)
        self.left -= self.setup.steps * step_cost(self.record)
        return losses_of(fork)


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
    mean = float(np.mean(losses[-quarter(steps) :]))
    return mean if mean <= _DIVERGED * max(abs(losses[0]), 1.0) else math.inf


def compared(
    fix: str,
    losses: Sequence[float],
    without: Sequence[float],
    steps: int,
    by_rate: Trial | None = None,
) -> Trial:
    """Return the trial of a fix from its run, the plain run, and that at another learning rate.

    The standard error of n numbers, the losses of the last quarter or their paired differences, is
    std/√n; NaN if one of the runs diverged, or if there is only one step.
    """
    loss, loss_without = at_the_end(losses, steps), at_the_end(without, steps)
    n = quarter(steps)

    def error(of: ArrayLike) -> float:
        return float(np.std(of, ddof=1) / math.sqrt(n)) if n > 1 else math.nan

    own = error(losses[-n:]) if math.isfinite(loss) else math.nan
    both = math.isfinite(loss) and math.isfinite(loss_without)
    return Trial(
        fix=fix,
        steps=steps,
        loss=loss,
        loss_without=loss_without,
        loss_by_rate=None if by_rate is None else by_rate.loss,
        error=error(np.subtract(without[-n:], losses[-n:])) if both else math.nan,
        loss_error=own,
        error_by_rate=math.nan if by_rate is None else math.hypot(own, by_rate.loss_error),
    )


def constant_loss(record: Record) -> float | None:
    """Return the loss of a constant prediction; None: unknown, or the loss need not fall."""
    return None if is_opposed(record) else record.chance


def quarter(steps: int) -> int:
    """Return the number of steps of a quarter, at least two to judge their difference."""
    return min(steps, max(2, math.ceil(steps / 4)))


def step_cost(record: Record) -> float:
    """Return the cost of a step; 0 if it is unknown."""
    cost = record.facts.step_cost
    return 0.0 if math.isnan(cost) else cost


def within(setup: Setup, record: Record, runs: int, cost: float) -> Setup | None:
    """Return the setup with as many steps as `cost` allows for all runs; None: too few.

    Number and length of runs follow from the cost of a step, not from a clock.
    """
    each = step_cost(record)
    fitting = setup.steps if each == 0 else min(setup.steps, int(min(cost / (runs * each), 1e9)))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)
