"""Trials of fixes and of learning rates: forks are trained and compared with the run as it is.

Other learning rates are tried so that no fix gets the credit for their effect.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import Progress, train
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply, Fix
from adiv_monitor.audit.trials.fixes.optimizer import FAR_FACTORS, rate_name, scale_rate
from adiv_monitor.diagnosis.course import FEWEST, is_opposed
from adiv_monitor.diagnosis.faults.remedies import usual_factor
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record

Losses = tuple[float, ...]

# Largest costs of the trials of learning rates, of one batch and of fixes, in the unit of
# `Facts.step_cost`: together some 120 steps of a ResNet-18 on 16 images of 64 × 64.
FOR_RATES, FOR_ONE_BATCH, FOR_FIXES = 28.0, 8.0, 16.0
_DIVERGED = 1e3
FACTORS = (0.1, 0.3, 3.0, 10.0)
_FEWEST = (0.1, 10.0)
_BEYOND = {0.1: (0.01,), 10.0: (100.0, 1000.0)}  # tried while it gets better, at that end
_LOWER = (0.1, 0.01, 0.001)  # tried first where the loss rises, until one helps
# The factors on the learning rate that a fix is tried with, each with the one that must be the best
# before it: one step in both directions, then on in the better one while it gets better. These are
# at most five runs, as many as the unchanged model has.
_AFTER = ((3.0, None), (0.3, None), (10.0, 3.0), (100.0, 10.0), (0.1, 0.3), (0.01, 0.1))


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
        left: number of steps that further runs may have in all.
    """

    setup: Setup
    record: Record
    cap: Cap = NEVER
    left: float = math.inf

    @cached_property
    def without(self) -> Losses:
        """The losses of the unchanged run with the steps of `setup`.

        The observed run is that run: forks begin with the same weights, and the monitor does not
        change them. If the record holds only a part of the run, it is run again.
        """
        losses = self.record.losses[: self.setup.steps]
        if len(losses) == self.setup.steps or (losses and not math.isfinite(losses[-1])):
            return losses
        return losses_of(self.setup.fork())

    def trial(self, fix: Fix, layers: Sequence[str]) -> Trial:
        """Train forks with the fix: at the run's learning rate, and at others if it rescales.

        Raises:
            CapReached: there is no time for one run.
            DoesNotApply: the fix has nothing to change.
            KeyboardInterrupt: the user interrupted a run.
        """
        best, runs = 1.0, {1.0: self.losses(fix, layers)}
        for factor, after in _AFTER if fix.rescales else ():
            if after in (None, best) and self.may_run:
                with suppress(CapReached):
                    runs[factor] = self.losses(fix, layers, factor)
                best = min(runs, key=lambda each: at_the_end(runs[each], self.setup.steps))
        by_rate = min(self.record.rates.values(), key=lambda trial: trial.loss, default=None)
        found = self.compared(fix.name, runs[best], by_rate)
        return replace(found, rate=best, runs=len(runs))

    def compared(self, name: str, losses: Losses, by_rate: Trial | None = None) -> Trial:
        """Return the trial of a fix from the losses of its run."""
        found = compared(name, losses, self.without, self.setup.steps, by_rate)
        return replace(found, constant=None if is_opposed(self.record) else self.record.chance)

    @property
    def may_run(self) -> bool:
        """Whether the steps of one more run are left."""
        return self.setup.steps <= self.left

    def losses(self, fix: Fix, layers: Sequence[str] = (), factor: float = 1.0) -> Losses:
        """Return the losses of a run with the fix and another learning rate; raises as `trial`."""
        fork = self.setup.fork()
        fix.apply(fork, layers, self.record)
        if factor != 1:
            scale_rate(fork.optimizer, factor)
        self.cap.check(self.record, self.setup.steps)
        self.left -= self.setup.steps
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

    def error(of: Any) -> float:
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


def quarter(steps: int) -> int:
    """Return the number of steps of a quarter, at least two to judge their difference."""
    return min(steps, max(2, math.ceil(steps / 4)))


def affordable(record: Record, cost: float) -> float:
    """Return the number of steps that a cost allows; infinite if that of a step is unknown."""
    each = record.facts.step_cost
    return cost / each if each > 0 else math.inf


def within(setup: Setup, record: Record, runs: int, cost: float) -> Setup | None:
    """Return the setup with as many steps as `cost` allows for all runs; None: too few.

    Number and length of runs follow from the cost of a step, not from a clock.
    """
    fitting = int(min(setup.steps, affordable(record, cost) / runs))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)


def rate_trials(
    setup: Setup, record: Record, *, cap: Cap = NEVER, progress: Progress = silent
) -> dict[float, Trial]:
    """Return runs at the learning rate × 0.1, 0.3, 3 and 10, and some beyond the better end.

    A run whose loss rises is first tried at × 0.1, 0.01 and 0.001: if one of them helps, it is the
    last. If the runs cost too much, only × 0.1 and 10 are tried. If layers hardly move, further
    runs use the power of ten at which activations would move by a hundredth of their length, and
    then ten times that, or a tenth of it, as long as the loss gets lower.

    If steps are costly, runs are shorter than those of the setup; if they would be too short to
    show an effect, nothing is tried.

    Args:
        setup: training setup.
        record: record of the unchanged run.
        cap: time by which the runs end.
        progress: called with ("learning rates", runs done, runs).

    Returns:
        Factor → trial, smallest factor first; empty if nothing was tried, or if the optimizer has
        no learning rate.

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    for factors in (FACTORS, _FEWEST):
        if (shorter := within(setup, record, len(factors) + 1, FOR_RATES)) is not None:
            break
    else:
        return {}
    runs = _Runs(Bench(shorter, record, cap))
    try:
        with suppress(CapReached):
            if not (runs.rises and any(runs.trial(factor).helps for factor in _LOWER)):
                for done, factor in enumerate(factors):
                    runs.end(factor)
                    progress("learning rates", done + 1, len(factors) + 1)
                best = min(sorted(runs.losses), key=runs.end)
                runs.follow((best, *_BEYOND.get(best, ())))
                if (far := far_factor(record)) is not None:  # in the direction that gets better
                    here = FAR_FACTORS.index(far)
                    if not runs.follow(FAR_FACTORS[here:]):
                        runs.follow(FAR_FACTORS[here::-1])
    except DoesNotApply:
        return {}
    progress("learning rates", len(factors) + 1, len(factors) + 1)
    return {factor: runs.trial(factor) for factor in sorted(runs.losses) if factor != 1}


class _Runs:
    """Runs at several learning rates, each of which is made when its end is first requested.

    Attributes:
        losses: factor on the learning rate → losses of its run.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.losses: dict[float, Losses] = {1.0: bench.without}

    def end(self, factor: float) -> float:
        """Return the loss at the end of the run at this factor.

        Raises:
            CapReached: there is no time for the run.
            DoesNotApply: the optimizer has no learning rate.
        """
        if factor not in self.losses:
            self.losses[factor] = self._bench.losses(FIXES[rate_name(factor)])
        return at_the_end(self.losses[factor], self._bench.setup.steps)

    def trial(self, factor: float) -> Trial:
        """Return the trial of this factor; raises as `end` does."""
        self.end(factor)
        return self._bench.compared(rate_name(factor), self.losses[factor])

    def follow(self, factors: Sequence[float]) -> bool:
        """Try one factor after another while the loss gets lower; return whether it ever did."""
        lower = takewhile(lambda x: self.end(x[1]) < self.end(x[0]), pairwise(factors))
        return bool([*lower])

    @property
    def rises(self) -> bool:
        """Whether the unchanged run ends above its first loss, and above a constant prediction."""
        constant = self.trial(1.0).constant
        return self.end(1.0) > max(self.losses[1.0][0], -math.inf if constant is None else constant)


def far_factor(record: Record) -> float | None:
    """Return the power of ten on the learning rate at which activations would move by a hundredth.

    It is None if some layer moves by more than a few ten-thousandths in a step, so that the usual
    factors suffice, or if no layer has a measured step.
    """
    factor = usual_factor(move.value for move in by_layer(record, "update_ratio").values())
    return next((far for far in FAR_FACTORS if factor and math.isclose(far, factor)), None)


def best_rate(rates: Mapping[float, Trial]) -> float:
    """Return the factor with the lowest loss; 1 if none is below that of the unchanged run."""
    best = min(sorted(rates), key=lambda factor: rates[factor].loss, default=1.0)
    return best if rates and rates[best].loss < rates[best].loss_without else 1.0
