"""Trials of other learning rates, so that no fix gets the credit for their effect."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress
from adiv_monitor.audit.trials.budget import FOR_RATES, Cap, CapReached, within
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.audit.trials.fixes.optimizer import FAR_FACTORS, rate_name
from adiv_monitor.audit.trials.trial import (
    Losses,
    at_the_end,
    compared,
    constant_loss,
    losses_of,
    plain_losses,
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
    setup: Setup,
    record: Record,
    *,
    cost: float = FOR_RATES,
    cap: Cap | None = None,
    progress: Progress | None = None,
) -> dict[float, Trial]:
    """Return runs at the learning rate × 0.1, 0.3, 3 and 10, and some beyond the better end.

    A run whose loss rises is first tried at × 0.1, 0.01 and 0.001: if one of them helps, it is the
    last. If the runs cost too much, only × 0.1 and 10 are tried. If layers hardly move, further
    runs use the power of ten at which activations would move by a hundredth of their length, and
    then ten times that, or a tenth of it, as long as the loss gets lower.

    Args:
        setup: training setup.
        record: record of the unchanged run.
        cost: largest cost of all runs: if steps are costly, runs are shorter than those of the
            setup; if they would be too short to show an effect, nothing is tried.
        cap: time by which the runs end; None: unlimited.
        progress: called with ("learning rates", runs done, runs).

    Returns:
        Factor → trial, smallest factor first; empty if nothing was tried, or if the optimizer has
        no learning rate.

    Raises:
        KeyboardInterrupt: the user interrupted a run.
    """
    for factors in (FACTORS, _FEWEST):
        shorter = within(setup, record, len(factors) + 1, cost)
        if shorter is not None:
            break
    else:
        return {}
    runs = _Runs(shorter, record, Cap() if cap is None else cap)
    try:
        with suppress(CapReached):
            if not (runs.rises and any(runs.trial(factor).helps for factor in _LOWER)):
                _around(factors, runs, progress)
                if (far := far_factor(record)) is not None:
                    _sweep(far, runs)
    except DoesNotApply:
        return {}
    if progress is not None:
        progress("learning rates", len(factors) + 1, len(factors) + 1)
    return {factor: runs.trial(factor) for factor in sorted(runs.losses) if factor != 1}


def _around(factors: Sequence[float], runs: "_Runs", progress: Progress | None) -> None:
    """Try these factors, and those beyond the end at which the loss is lowest."""
    for done, factor in enumerate(factors):
        runs.end(factor)
        if progress is not None:
            progress("learning rates", done + 1, len(factors) + 1)
    best = min(sorted(runs.losses), key=runs.end)
    for factor in _BEYOND.get(best, ()):
        if not runs.end(factor) < runs.end(best):
            break
        best = factor


class _Runs:
    """Runs at several learning rates, each of which is made when its end is first requested.

    Attributes:
        losses: factor on the learning rate → losses of its run.
    """

    def __init__(self, setup: Setup, record: Record, cap: Cap) -> None:
        self._setup, self._record, self._cap = setup, record, cap
        self.losses: dict[float, Losses] = {1.0: plain_losses(setup, record)}

    def end(self, factor: float) -> float:
        """Return the loss at the end of the run at this factor.

        Raises:
            CapReached: there is no time for the run.
            DoesNotApply: the optimizer has no learning rate.
        """
        if factor not in self.losses:
            self._cap.check(self._record, self._setup.steps)
            fork = self._setup.fork()
            FIXES[rate_name(factor)].apply(fork)
            self.losses[factor] = losses_of(fork)
        return at_the_end(self.losses[factor], self._setup.steps)

    def trial(self, factor: float) -> Trial:
        """Return the trial of this factor; raises as `end` does."""
        self.end(factor)
        steps, name = self._setup.steps, rate_name(factor)
        found = compared(name, self.losses[factor], self.losses[1.0], steps)
        return replace(found, constant=constant_loss(self._record))

    @property
    def rises(self) -> bool:
        """Whether the unchanged run ends above its first loss, and above a constant prediction."""
        constant = constant_loss(self._record)
        return self.end(1.0) > max(self.losses[1.0][0], -math.inf if constant is None else constant)


def far_factor(record: Record) -> float | None:
    """Return the power of ten on the learning rate at which activations would move by a hundredth.

    It is None if some layer moves by more than a few ten-thousandths in a step, so that the usual
    factors suffice, or if no layer has a measured step.
    """
    factor = usual_factor(move.value for move in by_layer(record, "update_ratio").values())
    return next((far for far in FAR_FACTORS if factor and math.isclose(far, factor)), None)


def _sweep(far: float, runs: _Runs) -> None:
    """Try decades from this factor on, in the direction in which the loss gets lower."""
    here = FAR_FACTORS.index(far)
    for step in (1, -1):
        place = here
        while 0 <= place + step < len(FAR_FACTORS) and (
            runs.end(FAR_FACTORS[place + step]) < runs.end(FAR_FACTORS[place])
        ):
            place += step
        if place != here:
            break


def best_rate(rates: Mapping[float, Trial]) -> float:
    """Return the factor with the lowest loss; 1 if none is below that of the unchanged run."""
    best = min(sorted(rates), key=lambda factor: rates[factor].loss, default=1.0)
    return best if rates and rates[best].loss < rates[best].loss_without else 1.0
