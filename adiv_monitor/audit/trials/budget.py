"""How many steps, and how many runs, a time allows."""

import math
import time
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.course import FEWEST
from adiv_monitor.diagnosis.record import Record


def within(setup: Setup, record: Record, runs: int, seconds: float) -> Setup | None:
    """The setup with as many steps as the time allows for so many runs; None: too few to tell."""
    each = step_seconds(record)
    fitting = setup.steps if each == 0 else min(setup.steps, int(min(seconds / (runs * each), 1e9)))
    return None if fitting < min(FEWEST, setup.steps) else replace(setup, steps=fitting)


def fewest(setup: Setup) -> Setup:
    """The setup with as few steps as can tell anything."""
    return replace(setup, steps=min(FEWEST, setup.steps))


def step_seconds(record: Record) -> float:
    """What a step takes; 0 where that is not known."""
    seconds = record.facts.seconds_per_step
    return 0.0 if math.isnan(seconds) else seconds


class Clock:
    """What is left of a time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def allows(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.perf_counter() + seconds <= self._end
