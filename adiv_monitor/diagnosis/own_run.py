"""Whether the copy that was trained behaves as the user's own run did, by its first losses."""

import math
from typing import NamedTuple

import numpy as np

from adiv_monitor.diagnosis.record import Record

FEWEST = 4  # losses of one half of the steps that both know, two of which have an error
# The mean difference of a half is beyond so many of its standard errors, this share of the larger
# mean, and this share of the first loss. Of 108 pairs of healthy runs whose batches come in another
# order none is; without the last of these four are.
ERRORS, SHARE, OF_THE_FIRST = 4.0, 0.25, 0.2


class Difference(NamedTuple):
    """Where two runs part.

    Attributes:
        first: step, from which on.
        last: the last step that was compared.
        own: mean loss of the user's run over them.
        copy: of the copy.
    """

    first: int
    last: int
    own: float
    copy: float


def difference(record: Record) -> Difference | None:
    """The first half of the common steps in which the losses differ; None: in neither, or unknown.

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
    """The steps whose loss is known of both runs."""
    return sorted(step for step in record.own_losses if 0 <= step < len(record.losses))


def said(record: Record) -> str:
    """What the verdict says of it in front; "" where the copy behaves as the run did."""
    found = difference(record)
    if found is None:
        return ""
    return (
        f"The copy does not train as your run did: over the steps {found.first} to {found.last} "
        f"its loss is {found.copy:.3g} where yours was {found.own:.3g}. What makes them differ is "
        "not in the copy, and may be what is wrong. Of the copy: "
    )


def lacks(record: Record) -> str:
    """What the verdict says of what the copy lacks; "" where nothing is known to be missing."""
    return f" Not as in your run: {'; '.join(record.lost)}." if record.lost else ""


def compared(record: Record) -> str:
    """A note on the comparison; "" without losses of the user's own."""
    if not record.own_losses:
        return ""
    count = len(common_steps(record))
    if count < 2 * FEWEST:
        return (
            f"Of your run's losses {count} are of steps that the copy took, too few to compare: "
            f"{2 * FEWEST} are needed. Log every step, or give --steps more."
        )
    if difference(record) is None:
        return f"The copy's losses agree with your run's, over {count} steps."
    return ""
