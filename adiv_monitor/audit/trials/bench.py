"""A fix's trial: at the learning rate as it is, and where that may be wrong with it, at others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.trials.fixes import Fix
from adiv_monitor.audit.trials.fixes.rates import scale_rate
from adiv_monitor.audit.trials.trial import (
    Losses,
    at_the_end,
    compared,
    constant_loss,
    losses_of,
)
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.record import Record

# In both directions one step, in the better one on while it gets better: five runs at most, as
# many as the model as it is has had.
_UP, _DOWN = (3.0, 10.0, 100.0), (0.3, 0.1, 0.01)


@dataclass(frozen=True)
class Bench:
    """What all trials of one audit share.

    Attributes:
        setup: what is trained, with as many steps as each run has.
        record: of the run as it is.
        without: losses of the run as it is.
        may_run: whether there is time for one more run.
        hurried: there was no time for as many steps as the observed run has.
    """

    setup: Setup
    record: Record
    without: Losses
    may_run: Callable[[], bool]
    hurried: bool = False

    @property
    def by_rate(self) -> Trial | None:
        """Of the learning rates that were tried, the one of the lowest loss."""
        return min(self.record.rates.values(), key=lambda trial: trial.loss, default=None)

    def trial(self, fix: Fix, layers: Sequence[str]) -> Trial:
        """Train forks with the fix.

        Raises:
            DoesNotApply: there is nothing to change.
            KeyboardInterrupt: the keyboard ended a run.
        """
        steps = self.setup.steps
        runs = {1.0: self._losses(fix, layers, 1.0)}
        all_ran = True
        if fix.rescales:
            for factor in (_UP[0], _DOWN[0]):
                all_ran &= self._at(factor, runs, fix, layers)
            for here, further in (*pairwise(_UP), *pairwise(_DOWN)):
                if here in runs and self._best(runs) == here:
                    all_ran &= self._at(further, runs, fix, layers)
        best = self._best(runs)
        return replace(
            compared(fix.name, runs[best], self.without, steps, self.by_rate),
            rate=best,
            runs=len(runs),
            constant=constant_loss(self.record),
            hurried=self.hurried or not all_ran,
        )

    def _at(
        self, factor: float, runs: dict[float, Losses], fix: Fix, layers: Sequence[str]
    ) -> bool:
        """Whether there was time for it."""
        if not self.may_run():
            return False
        runs[factor] = self._losses(fix, layers, factor)
        return True

    def _best(self, runs: dict[float, Losses]) -> float:
        return min(runs, key=lambda factor: at_the_end(runs[factor], self.setup.steps))

    def _losses(self, fix: Fix, layers: Sequence[str], factor: float) -> Losses:
        fork = self.setup.fork()
        fix.apply(fork, layers, self.record)
        if factor != 1:
            scale_rate(fork.optimizer, factor)
        return losses_of(fork)
