"""How many steps, and how many runs, trials have: by what a step costs, not by the clock."""

import math
import time
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.record import Record

# What trials of learning rates, of one batch and of fixes may cost, in the unit of
# `Facts.step_cost`: of a ResNet-18 on 16 images of 64 × 64 some 120 steps in all.
FOR_RATES, FOR_ONE_BATCH, FOR_FIXES = 28.0, 8.0, 16.0


def within(setup: Setup, record: Record, runs: int, cost: float) -> Setup | None:
    """The setup with as many steps as `cost` allows for so many runs; None: too few to tell."""
    each = step_cost(record)
    fitting = setup.steps if each == 0 else min(setup.steps, int(min(cost / (runs * each), 1e9)))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)


def fewest(setup: Setup) -> Setup:
    """The setup with as few steps as can tell anything."""
    return replace(setup, steps=min(FEWEST, setup.steps))


def step_cost(record: Record) -> float:
    """What a step costs; 0 where that is not known."""
    cost = record.facts.step_cost
    return 0.0 if math.isnan(cost) else cost


class Budget:
    """What runs may still cost."""

    def __init__(self, cost: float) -> None:
        self._left = cost

    def allows(self, cost: float) -> bool:
        """Whether so much is left."""
        return cost <= self._left

    def spend(self, cost: float) -> None:
        """Take it from what is left."""
        self._left -= cost


class CapReached(Exception):
    """A run would end later than trials may."""


class Cap:
    """The time on the clock by which all trials end.

    Attributes:
        reached: a run was not begun because it would have ended later.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.perf_counter() + seconds
        self.reached = False

    def check(self, record: Record, steps: int) -> None:
        """Raise CapReached if a run of so many steps, as fast as the observed one, ends later."""
        each = record.facts.seconds_per_step
        takes = 0.0 if math.isnan(each) else steps * each
        if time.perf_counter() + takes > self._end:
            self.reached = True
            raise CapReached
