"""Other learning rates, which are always tried: what one would fix is no merit of another fix."""

import math
from collections.abc import Mapping
from dataclasses import replace

from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import Progress
from adiv_monitor.audit.trials.budget import within
from adiv_monitor.audit.trials.fixes import FIXES, DoesNotApply
from adiv_monitor.audit.trials.fixes.rates import FAR_FACTORS, rate_name
from adiv_monitor.audit.trials.trial import (
    Losses,
    at_the_end,
    compared,
    constant_loss,
    losses_of,
    plain_losses,
)
from adiv_monitor.diagnosis.finding import Trial
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record

FACTORS = (0.1, 0.3, 3.0, 10.0)
_FEWEST = (0.1, 10.0)
_BEYOND = {0.1: 0.01, 10.0: 100.0}  # tried as well, if the best is at that end
MOVES = 0.01  # of their length: how far activations move in a step where something is learnt


def rate_trials(
    setup: Setup, record: Record, *, seconds: float = 20.0, progress: Progress | None = None
) -> dict[float, Trial]:
    """Short runs at the learning rate × 0.1, 0.3, 3 and 10, and once further at the better end.

    Where there is no time for all of them, × 0.1 and 10 alone. Where all layers stand still, also
    at the power of ten at which their activations would move by a hundredth of their length, and
    then at ten times that, or at a tenth, as long as it gets better.

    Args:
        setup: what is trained.
        record: of the run as it is.
        seconds: roughly how long all of it may take: runs are shorter than the setup's where steps
            are slow; nothing is tried where they would be too short to tell.
        progress: called with ("learning rates", runs done, runs).

    Returns:
        By factor, smallest first; empty where nothing was tried, or where the optimizer has no
        learning rate.

    Raises:
        KeyboardInterrupt: the keyboard ended a run.
    """
    for factors in (FACTORS, _FEWEST):
        shorter = within(setup, record, len(factors) + 1, seconds)
        if shorter is not None:
            break
    else:
        return {}
    without = plain_losses(shorter, record)
    found: dict[float, Losses] = {}
    try:
        for factor in factors:
            found[factor] = _losses_at(factor, shorter)
            if progress is not None:
                progress("learning rates", len(found), len(factors) + 1)
        every = {**found, 1.0: without}
        ends = {factor: at_the_end(losses, shorter.steps) for factor, losses in every.items()}
        best = min(sorted(ends), key=ends.__getitem__)
        if best in _BEYOND:
            found[_BEYOND[best]] = _losses_at(_BEYOND[best], shorter)
        if (far := far_factor(record)) is not None:
            _sweep(far, found, without, shorter)
    except DoesNotApply:
        return {}
    if progress is not None:
        progress("learning rates", len(factors) + 1, len(factors) + 1)
    hurried = factors is not FACTORS or shorter.steps < setup.steps
    return {
        factor: replace(
            compared(rate_name(factor), found[factor], without, shorter.steps),
            constant=constant_loss(record),
            hurried=hurried,
        )
        for factor in sorted(found)
    }


def far_factor(record: Record) -> float | None:
    """The power of ten on the learning rate at which activations would move by a hundredth.

    None: some layer moves by more than a hundred-thousandth in a step, so that the usual factors
    get there, or none has a step that could be measured.
    """
    moves = [move.value for move in by_layer(record, "update_ratio").values()]
    largest = max(moves, default=0.0)
    if not largest > 0:
        return None
    decade = round(math.log10(MOVES / largest))
    return next((factor for factor in FAR_FACTORS if round(math.log10(factor)) == decade), None)


def _sweep(far: float, found: dict[float, Losses], without: Losses, setup: Setup) -> None:
    """By decades from there, in the direction in which the loss gets lower."""

    def end(factor: float) -> float:
        if factor not in found:
            found[factor] = _losses_at(factor, setup)
        return at_the_end(found[factor], setup.steps)

    here = FAR_FACTORS.index(far)
    for step in (1, -1):
        place = here
        while 0 <= place + step < len(FAR_FACTORS) and (
            end(FAR_FACTORS[place + step]) < end(FAR_FACTORS[place])
        ):
            place += step
        if place != here:
            break


def too_slow(setup: Setup, record: Record, seconds: float) -> bool:
    """Whether steps are too slow for any other learning rate to be tried in so many seconds."""
    return within(setup, record, len(_FEWEST) + 1, seconds) is None


def best_rate(rates: Mapping[float, Trial]) -> float:
    """The factor of the lowest loss; 1 where none is lower than as it is."""
    best = min(sorted(rates), key=lambda factor: rates[factor].loss, default=1.0)
    return best if rates and rates[best].loss < rates[best].loss_without else 1.0


def _losses_at(factor: float, setup: Setup) -> Losses:
    fork = setup.fork()
    FIXES[rate_name(factor)].apply(fork)
    return losses_of(fork)
