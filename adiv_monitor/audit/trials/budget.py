"""Number of steps and runs of trials, which follow from the cost of a step, not from a clock."""

import math
import time
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.record import Record

# Largest costs of the trials of learning rates, of one batch and of fixes, in the unit of
# `Facts.step_cost`: together some 120 steps of a ResNet-18 on 16 images of 64 × 64.
FOR_RATES, FOR_ONE_BATCH, FOR_FIXES = 28.0, 8.0, 16.0


def within(setup: Setup, record: Record, runs: int, cost: float) -> Setup | None:
    """Return the setup with as many steps as `cost` allows for all runs; None: too few."""
    each = step_cost(record)
    fitting = setup.steps if each == 0 else min(setup.steps, int(min(cost / (runs * each), 1e9)))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)


def fewest(setup: Setup) -> Setup:
    """Return the setup with the smallest number of steps that shows an effect."""
    return replace(setup, steps=min(FEWEST, setup.steps))


def step_cost(record: Record) -> float:
    """Return the cost of a step; 0 if it is unknown."""
    cost = record.facts.step_cost
    return 0.0 if math.isnan(cost) else cost


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
