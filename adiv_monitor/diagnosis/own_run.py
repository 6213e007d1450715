"""Comparison of the first losses of the trained copy with those of the user's own run."""

import math
from typing import NamedTuple

import numpy as np

from adiv_monitor.diagnosis.record import Record

FEWEST = 4  # losses of one half of the steps that both know, two of which have an error
# Limits of the mean difference over a half of the steps: in standard errors, as a share of the
# larger mean, and as a share of the first loss. None of 108 pairs of healthy runs with differently
# ordered batches exceeds all three; without the last limit four pairs would.
ERRORS, SHARE, OF_THE_FIRST = 4.0, 0.25, 0.2


class Difference(NamedTuple):
    """A difference between the losses of two runs.

    Attributes:
        first: first step of the half in which they differ.
        last: last step of that half.
        own: mean loss of the user's run over these steps.
        copy: mean loss of the copy over these steps.
    """

    first: int
    last: int
    own: float
    copy: float


def difference(record: Record) -> Difference | None:
    """Return where the losses of the common steps differ; None if they agree, or are too few.

    The steps are judged in two halves, and the first half that differs is returned:

    mean(d) > max(4 std(d)/√n, max(means)/4, first/5) of the n paired differences d of a half.
    """
    steps = common_steps(record)
    if len(steps) < 2 * FEWEST:
        return None
    middle = len(steps) // 2
    for half in (steps[:middle], steps[middle:]):
        own = np.array([record.own_losses[step] for step in half])
        copy = np.array([record.losses[step] for step in half])
        told = Difference(half[0], half[-1], float(own.mean()), float(copy.mean()))
        if np.isfinite(own).all() != np.isfinite(copy).all():
            return told
        if not np.isfinite(own).all():
            continue
        d = own - copy
        error = float(d.std(ddof=1) / math.sqrt(len(d)))
        larger = max(abs(told.own), abs(told.copy))
        least = max(ERRORS * error, SHARE * larger, OF_THE_FIRST * abs(record.losses[0]))
        if abs(float(d.mean())) > least:
            return told
    return None


def common_steps(record: Record) -> list[int]:
    """Return the steps whose loss is known in both runs."""
    return sorted(step for step in record.own_losses if 0 <= step < len(record.losses))


def said(record: Record) -> str:
    """Return the beginning of the verdict if the two runs differ, else ""."""
    found = difference(record)
    if found is None:
        return ""
    return (
        f"The copy does not train as your run did: over the steps {found.first} to {found.last}, "
        f"its mean loss is {found.copy:.3g}, and yours was {found.own:.3g}. The copy lacks the "
        "cause of this difference, which may be the fault of your run. About the copy: "
    )


def compared(record: Record) -> str:
    """Return a note on the comparison of losses; "" if the user gave no losses, or they differ."""
    if not record.own_losses:
        return ""
    count = len(common_steps(record))
    if count < 2 * FEWEST:
        return (
            f"Only {count} of your run's losses belong to steps that the copy took, and a "
            f"comparison needs {2 * FEWEST}. Log every step, or raise --steps."
        )
    if difference(record) is None:
        return f"The copy's losses agree with those of your run over {count} steps."
    return ""
