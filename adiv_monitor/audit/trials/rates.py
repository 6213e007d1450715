"""Trials of other learning rates, so that no fix gets the credit for their effect."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.audit.trials.fixes.optimizer import FAR_FACTORS, rate_name
from adiv_monitor.audit.trials.trial import (
    FOR_RATES,
    NEVER,
    Bench,
    Cap,
    CapReached,
    Losses,
    at_the_end,
    silent,
    within,
)
from adiv_monitor.diagnosis.faults.remedies import usual_factor
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record

FACTORS = (0.1, 0.3, 3.0, 10.0)
_FEWEST = (0.1, 10.0)
_BEYOND = {0.1: (0.01,), 10.0: (100.0, 1000.0)}  # tried while it gets better, at that end
_LOWER = (0.1, 0.01, 0.001)  # tried first where the loss rises, until one helps


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
        lower = list(
            takewhile(lambda pair: self.end(pair[1]) < self.end(pair[0]), pairwise(factors))
        )
        return bool(lower)

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
