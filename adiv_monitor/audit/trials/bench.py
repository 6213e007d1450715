"""The trial of one fix: at the run's learning rate, and at others if that may not suit the fix."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.trials.budget import Cap, CapReached, step_cost
from adiv_monitor.audit.trials.fixes import Fix
from adiv_monitor.audit.trials.fixes.optimizer import scale_rate
from adiv_monitor.audit.trials.trial import (
    Losses,
    at_the_end,
    compared,
    constant_loss,
    losses_of,
)
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

# One step in both directions, then on in the better one while it gets better: at most five runs,
# as many as the unchanged model had.
_UP, _DOWN = (3.0, 10.0, 100.0), (0.3, 0.1, 0.01)


@dataclass
class Bench:
    """The state that all trials of one audit share.

    Attributes:
        setup: the training setup, with as many steps as each run has.
        record: record of the unchanged run.
        without: losses of the unchanged run.
        left: cost that further runs may have.
        cap: time by which runs must end.
    """

    setup: Setup
    record: Record
    without: Losses
    left: float
    cap: Cap = field(default_factory=Cap)

    @property
    def by_rate(self) -> Trial | None:
        """The tried learning rate with the lowest loss."""
        return min(self.record.rates.values(), key=lambda trial: trial.loss, default=None)

    def trial(self, fix: Fix, layers: Sequence[str]) -> Trial:
        """Train forks with the fix.

        Raises:
            CapReached: there is no time for one run.
            DoesNotApply: the fix has nothing to change.
            KeyboardInterrupt: the user interrupted a run.
        """
        steps = self.setup.steps
        runs = {1.0: self._losses(fix, layers, 1.0)}
        if fix.rescales:
            for factor in (_UP[0], _DOWN[0]):
                self._at(factor, runs, fix, layers)
            for here, further in (*pairwise(_UP), *pairwise(_DOWN)):
                if here in runs and self._best(runs) == here:
                    self._at(further, runs, fix, layers)
        best = self._best(runs)
        return replace(
            compared(fix.name, runs[best], self.without, steps, self.by_rate),
            rate=best,
            runs=len(runs),
            constant=constant_loss(self.record),
        )

    @property
    def may_run(self) -> bool:
        """Whether the cost of one more run is left."""
        return self._cost <= self.left

    @property
    def _cost(self) -> float:
        return self.setup.steps * step_cost(self.record)

    def _at(
        self, factor: float, runs: dict[float, Losses], fix: Fix, layers: Sequence[str]
    ) -> None:
        if self.may_run:
            with suppress(CapReached):
                runs[factor] = self._losses(fix, layers, factor)

    def _best(self, runs: dict[float, Losses]) -> float:
        return min(runs, key=lambda factor: at_the_end(runs[factor], self.setup.steps))

    def _losses(self, fix: Fix, layers: Sequence[str], factor: float) -> Losses:
        fork = self.setup.fork()
        fix.apply(fork, layers, self.record)
        if factor != 1:
            scale_rate(fork.optimizer, factor)
        self.cap.check(self.record, self.setup.steps)
        self.left -= self._cost
        return losses_of(fork)
