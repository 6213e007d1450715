"""Comparison of the first losses of the trained copy with those of the user's own run."""

import math

import numpy as np

from adiv_monitor.diagnosis.record import Record

FEWEST = 4  # losses of one half of the steps that both know, two of which have an error
# Limits of the mean difference over a half of the steps: in standard errors, as a share of the
# larger mean, and as a share of the first loss. None of 108 pairs of healthy runs with differently
# ordered batches exceeds all three; without the last limit four pairs would.
ERRORS, SHARE, OF_THE_FIRST = 4.0, 0.25, 0.2


def difference(record: Record) -> str:
    """Return the words for the common steps whose losses differ; "" if they agree, or are too few.

    The steps are judged in two halves, and the first half that differs is returned:

    mean(d) > max(4 std(d)/√n, max(means)/4, first/5) of the n paired differences d of a half.
    """
    steps = common_steps(record)
    middle = len(steps) // 2
    for half in (steps[:middle], steps[middle:]) if middle >= FEWEST else ():
        own = np.array([record.own_losses[step] for step in half])
        copy = np.array([record.losses[step] for step in half])
        differs = np.isfinite(own).all() != np.isfinite(copy).all()
        if np.isfinite(own).all() and not differs:
            error = float((own - copy).std(ddof=1) / math.sqrt(len(half)))
            larger = SHARE * max(abs(own.mean()), abs(copy.mean()))
            least = max(ERRORS * error, larger, OF_THE_FIRST * abs(record.losses[0]))
            differs = abs((own - copy).mean()) > least
        if differs:
            return (
                f"over the steps {half[0]} to {half[-1]}, its mean loss is {copy.mean():.3g}, and "
                f"yours was {own.mean():.3g}"
            )
    return ""


def common_steps(record: Record) -> list[int]:
    """Return the steps whose loss is known in both runs."""
    return sorted(step for step in record.own_losses if 0 <= step < len(record.losses))


def said(record: Record) -> str:
    """Return the beginning of the verdict if the two runs differ, else ""."""
    if not (differs := difference(record)):
        return ""
    return (
        f"The copy does not train as your run did: {differs}. The copy lacks the cause of this "
        "difference, which may be the fault of your run. About the copy: "
    )


def compared(record: Record) -> str:
    """Return a note on the comparison of losses; "" if the user gave no losses, or they differ."""
    count = len(common_steps(record))
    if not record.own_losses or difference(record):
        return ""
    if count < 2 * FEWEST:
        return (
            f"Only {count} of your run's losses belong to steps that the copy took, and a "
            f"comparison needs {2 * FEWEST}. Log every step, or raise --steps."
        )
    return f"The copy's losses agree with those of your run over {count} steps."
