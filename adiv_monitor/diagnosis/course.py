"""How the loss went: what must be seen before a rule says "act"."""

import math
from statistics import fmean, median

from adiv_monitor.diagnosis.record import Record

# A loss that moves by less than this share of itself over the whole run stands still; the same
# share per window is TheDeepChecker's (A. Ben Braiek, F. Khomh, TOSEM 2022).
STILL = 0.05
# Of the fall that its gradient promises, what a loss falls by in however short a step: 1 to nine
# digits in the fault benchmark's runs, 0.66 at most in a hundred small generative adversarial
# networks.
OPPOSED = 0.9
FAR_BELOW = 100.0  # times the first loss, at least 1
FEWEST = 12  # steps of a run that can tell anything


def is_long_enough(record: Record) -> bool:
    """Whether the loss can be judged: of a few steps only that they burst can be told."""
    return len(record.losses) >= FEWEST or not all(map(math.isfinite, record.losses))


def is_opposed(record: Record) -> bool:
    """Whether parts of the loss oppose each other, as two players' do: how it falls tells nothing.

    Neither that it does not, nor at which learning rate it falls furthest.
    """
    return record.descent_share is not None and record.descent_share < OPPOSED


def is_unbounded(record: Record) -> bool:
    """Whether the loss falls ever faster, far below zero: something in it has no lowest value.

    Its mean over the last quarter of the steps lies a hundred times further below zero than the
    first loss from it, and fell further to there than from the second quarter to the third.
    """
    losses = [loss for loss in record.losses if math.isfinite(loss)]
    if len(losses) < FEWEST:
        return False
    n = len(losses) // 4
    second, third, last = (fmean(losses[-i * n : len(losses) - (i - 1) * n]) for i in (3, 2, 1))
    return last < -FAR_BELOW * max(1.0, abs(losses[0])) and third - last > second - third


def tells_nothing(record: Record) -> bool:
    """Whether the loss says nothing by how far it falls: its parts oppose, or it has no lowest."""
    return is_opposed(record) or is_unbounded(record)


def start(record: Record) -> float:
    """The first loss; where it is known, that of a constant prediction if the first is worse."""
    if not record.losses:
        return math.nan
    first = record.losses[0]
    return first if record.chance is None else min(first, record.chance)


def end(record: Record) -> float:
    """The mean loss of the last quarter of the steps; infinite where it stopped being finite."""
    if not record.losses:
        return math.nan
    if not math.isfinite(record.losses[-1]):
        return math.inf
    return fmean(record.losses[-_quarter(record) :])


def noise(record: Record) -> float:
    """Standard deviation of the loss from one step's batch to the next, its trend taken out.

    From the median distance of neighbours: 0.954 σ for normal noise.
    """
    pairs = zip(record.losses, record.losses[1:], strict=False)
    distances = [abs(b - a) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return median(distances) / 0.954 if distances else 0.0


def fell(record: Record) -> bool:
    """Whether the loss fell by more than noise and by more than standing still.

    From the first step to the last quarter of them; or from the first quarter, whose mean has less
    noise than one batch. A loss that comes down a part of the way that it went up did not fall.
    """
    if not record.losses:
        return False
    n = _quarter(record)
    begin = fmean(record.losses[:n])
    way = record.losses[0] - end(record)
    return _moved(record, way) or (way > 0 and _moved(record, begin - end(record), n))


def rose(record: Record) -> bool:
    """Whether the loss rose by more than noise and by more than standing still, or burst."""
    return _moved(record, end(record) - record.losses[0]) if record.losses else False


def may_have_fallen(record: Record) -> bool:
    """Whether it ends lower by more than standing still, but noise might have done that."""
    lower = bool(record.losses) and record.losses[0] - end(record) > STILL * abs(record.losses[0])
    return lower and not fell(record)


def _quarter(record: Record) -> int:
    return max(1, len(record.losses) // 4)


def _moved(record: Record, way: float, of: int = 1) -> bool:
    """Whether a way from the mean of so many steps to that of the last quarter is one."""
    if math.isnan(way) or math.isinf(record.losses[0]):
        return False
    error = noise(record) * math.sqrt(1 / of + 1 / _quarter(record))
    return way > max(2 * error, STILL * abs(record.losses[0]))
