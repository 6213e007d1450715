"""What the loss does, which a rule must check before it says "act"; and what it did in your run."""

import math
from dataclasses import replace
from itertools import takewhile
from statistics import fmean, median
from typing import Literal

import numpy as np

from adiv_monitor.diagnosis.finding import FAR_BELOW
from adiv_monitor.diagnosis.record import Record

# A loss that changes by less than this share of itself over the whole run stands still. The same
# share per window is used by TheDeepChecker (A. Ben Braiek, F. Khomh, TOSEM 2022).
STILL = 0.05
# Limit of `Record.descent_share`, the decrease of a loss over the decrease that its gradient
# predicts in ever shorter steps: 1 to nine digits in the fault benchmark's runs, at most 0.66 in a
# hundred small generative adversarial networks.
OPPOSED = 0.9
FEWEST = 12  # fewest steps of a run whose loss can be judged
PEAK = 3.0  # times the first loss
OF_HALF = 4  # losses of one half of the steps that both know, two of which have an error
# Limits of the mean difference over a half of the steps: in standard errors, as a share of the
# larger mean, and as a share of the first loss. None of 108 pairs of healthy runs with differently
# ordered batches exceeds all three; without the last limit four pairs would.
ERRORS, SHARE, OF_THE_FIRST = 4.0, 0.25, 0.2

Course = Literal["rises", "falls", "does not fall", "unknown"]


def is_long_enough(record: Record) -> bool:
    """Return whether the loss can be judged: it has enough steps, or is not finite."""
    return len(record.losses) >= FEWEST or not all(map(math.isfinite, record.losses))


def is_known(record: Record) -> bool:
    """Return whether the loss is known of enough steps, and is finite at the end."""
    return is_long_enough(record) and math.isfinite(record.losses[-1])


def course(record: Record) -> Course:
    """Return what the loss does, up to where it is finite.

    - "rises": the last quarter is above the first value, and above the loss of a constant
      prediction (chance) where that is known, by more than noise.
    - "falls": see `fell`; and the last quarter is below chance.
    - "does not fall": all else, as a loss that ends at chance after a fall from far above it.
    - "unknown": too few losses are known.
    """
    finite = replace(record, losses=tuple(takewhile(math.isfinite, record.losses)))
    if len(finite.losses) < FEWEST:
        return "unknown" if finite.losses == record.losses else "does not fall"
    if rose(finite) and end(finite) > start(finite):
        return "rises"
    at_chance = record.chance is not None and end(finite) > (1 - STILL) * record.chance
    return "falls" if fell(finite) and not at_chance else "does not fall"


def is_measure(record: Record) -> bool:
    """Return whether reports show no reason for which the loss need not fall."""
    alone = not any(report.other_optimizers for report in record.reports)
    fresh = bool(record.reports) and record.reports[0].step == 0
    falls = not any(report.maximize for report in record.reports)
    return alone and fresh and falls and min(record.losses) >= 0


def smoothed(record: Record) -> list[float]:
    """Return the means of the losses over windows of an eighth of the run, one for each step."""
    width = max(1, len(record.losses) // 8)
    return [fmean(record.losses[max(0, i - width + 1) : i + 1]) for i in range(len(record.losses))]


def is_opposed(record: Record) -> bool:
    """Return whether parts of the loss oppose each other, as the losses of two players do.

    Then neither the course of the loss nor the learning rate at which it falls most is informative.
    """
    return record.descent_share is not None and record.descent_share < OPPOSED


def is_unbounded(record: Record) -> bool:
    """Return whether the loss has no lower bound, towards which the run goes.

    It ends below zero, and a copy's loss falls on without slowing down where the weights go further
    in the same direction. Or it falls ever faster, far below zero, here or at another learning
    rate.
    """
    lowest = min((t.loss for t in record.rates.values() if t.loss > -math.inf), default=0.0)
    falls_on = bool(record.found_by("unbounded-loss")) and end(record) < 0
    found = falls_on or is_far_below(record, lowest)
    return falls_ever_faster(record) or (found and not is_opposed(record))


def is_far_below(record: Record, loss: float) -> bool:
    """Return whether a loss is a hundred times further below zero than the first is from zero."""
    return bool(record.losses) and loss < -FAR_BELOW * max(1.0, abs(record.losses[0]))


def falls_ever_faster(record: Record) -> bool:
    """Return whether the loss falls ever faster, far below zero.

    Its mean over the last quarter of the steps is a hundred times further below zero than the first
    loss is from zero, and fell more since the third quarter than from the second to the third.
    """
    losses = [loss for loss in record.losses if math.isfinite(loss)]
    if len(losses) < FEWEST:
        return False
    n = len(losses) // 4
    second, third, last = (fmean(losses[-i * n : len(losses) - (i - 1) * n]) for i in (3, 2, 1))
    return is_far_below(record, last) and third - last > second - third


def tells_nothing(record: Record) -> bool:
    """Return whether the loss's decrease is uninformative: opposed, unbounded, moving targets."""
    return record.moving_targets or is_opposed(record) or is_unbounded(record)


def start(record: Record) -> float:
    """Return the first loss, or that of a constant prediction if it is known and lower."""
    first = record.losses[0] if record.losses else math.nan
    return first if record.chance is None else min(first, record.chance)


def end(record: Record) -> float:
    """Return the mean loss of the last quarter of the steps; infinite if it is not finite."""
    if record.losses and not math.isfinite(record.losses[-1]):
        return math.inf
    return fmean(record.losses[-_quarter(record) :]) if record.losses else math.nan


def noise(record: Record) -> float:
    """Return the standard deviation of the loss between steps, without its trend.

    It is estimated from the median distance of neighbours: 0.954 σ for normal noise.
    """
    pairs = zip(record.losses, record.losses[1:], strict=False)
    distances = [abs(b - a) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return median(distances) / 0.954 if distances else 0.0


def peaked(record: Record) -> bool:
    """Return whether the loss of any step was above `PEAK` times `start`."""
    return max(record.losses, default=0.0) > PEAK * start(record) > 0


def fell(record: Record) -> bool:
    """Return whether the loss fell by more than noise and by more than `STILL`.

    The decrease is taken from the first step to the mean of the last quarter, or from the mean of
    the first quarter, which has less noise than one batch. A loss that comes down part of the way
    that it went up did not fall, nor one that is not below half its first value after a peak of
    `PEAK` times that.
    """
    if not record.losses:
        return False
    first = record.losses[0]
    # Means are below their largest value: most runs need not be smoothed.
    peaked = max(record.losses) > PEAK * first > 0 and max(smoothed(record)) > PEAK * first
    if peaked and end(record) > first / 2:
        return False
    n = _quarter(record)
    begin = fmean(record.losses[:n])
    way = record.losses[0] - end(record)
    return _moved(record, way) or (way > 0 and _moved(record, begin - end(record), n))


def rose(record: Record) -> bool:
    """Return whether the loss rose by more than noise and by more than `STILL`, or diverged."""
    return _moved(record, end(record) - record.losses[0]) if record.losses else False


def fell_little(record: Record) -> bool:
    """Return whether the loss fell by less than `STILL`, but by more than noise, and still falls.

    The decrease is that of the mean, to the last quarter of the steps from the first, and from the
    third: a loss that fell to that of a constant prediction, and stays there, learnt nothing.
    """
    if not record.losses or fell(record):
        return False
    n = _quarter(record)
    least = end(record) + 2 * noise(record) * math.sqrt(2 / n)
    return min(fmean(record.losses[:n]), fmean(record.losses[-2 * n : -n] or (0.0,))) > least


def may_have_fallen(record: Record) -> bool:
    """Return whether the loss ends lower by more than `STILL`, but possibly by noise."""
    lower = bool(record.losses) and record.losses[0] - end(record) > STILL * abs(record.losses[0])
    return lower and not fell(record)


def _quarter(record: Record) -> int:
    return max(1, len(record.losses) // 4)


def _moved(record: Record, way: float, of: int = 1) -> bool:
    """Return whether a decrease from the mean of `of` steps to that of the last quarter is real."""
    if math.isnan(way) or math.isinf(record.losses[0]):
        return False
    error = noise(record) * math.sqrt(1 / of + 1 / _quarter(record))
    return way > max(2 * error, STILL * abs(record.losses[0]))


def difference(record: Record) -> str:
    """Return the words for the common steps whose losses differ; "" if they agree, or are too few.

    The steps are judged in two halves, and the first half that differs is returned:

    mean(d) > max(4 std(d)/√n, max(means)/4, first/5) of the n paired differences d of a half.
    """
    steps = _common_steps(record)
    middle = len(steps) // 2
    for half in (steps[:middle], steps[middle:]) if middle >= OF_HALF else ():
        own, copy = (np.array([x[s] for s in half]) for x in (record.own_losses, record.losses))
        finite = np.isfinite(own).all(), np.isfinite(copy).all()
        differs = finite[0] != finite[1]
        if all(finite):
            error = ERRORS * (own - copy).std(ddof=1) / math.sqrt(len(half))
            larger = SHARE * max(abs(own.mean()), abs(copy.mean()))
            least = max(error, larger, OF_THE_FIRST * abs(record.losses[0]))
            differs = abs((own - copy).mean()) > least
        if differs:
            means = f"its mean loss is {copy.mean():.3g}, and yours was {own.mean():.3g}"
            return f"over the steps {half[0]} to {half[-1]}, {means}"
    return ""


def _common_steps(record: Record) -> list[int]:
    """Return the steps whose loss is known in both runs."""
    return sorted(step for step in record.own_losses if 0 <= step < len(record.losses))


def note_on_own_losses(record: Record) -> str:
    """Return a note on the comparison of losses; "" if the user gave no losses, or they differ."""
    count = len(_common_steps(record))
    if not record.own_losses or difference(record):
        return ""
    if count < 2 * OF_HALF:
        only = f"Only {count} of your run's losses belong to steps that the copy took"
        return f"{only}, and a comparison needs {2 * OF_HALF}. Log every step, or raise --steps."
    return f"The copy's losses agree with those of your run over {count} steps."
