"""Were numbers not finite before training began, or may they soon not be?

What became not finite in training is asked about in `states`.
"""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.fault import LEARNING, act_if, fault
from adiv_monitor.diagnosis.faults.inputs import row_spread
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.remedies import clip_norm
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record

STEP = "the update"  # beginning of `Record.first_non_finite` if the optimizer made the value
# Smallest size of divisors of both signs, over their median: 0.02 in 64 normal numbers, 1 for
# divisors of one size.
CLOSE = 0.1
HUGE = 30.0  # largest result of a division over the median one; 6 for 4,096 normal numbers
DATA = "data"  # value of `Record.first_non_finite` if the value came with a batch


@fault("non-finite", "Values that are not finite", certain=True, shown_by=lambda record: True)
def non_finite_from_the_start(record: Record) -> Iterator[Finding]:
    """Find values that are not finite in the data, the initial weights or the first loss."""
    if is_broken(record) and not by_training(record):
        yield non_finite(record)


def is_broken(record: Record) -> bool:
    """Return whether some value is not finite."""
    return record.first_non_finite is not None or not all(map(math.isfinite, record.losses))


def by_training(record: Record) -> bool:
    """Return whether values became not finite in training; other findings are likely the cause."""
    if record.first_non_finite == DATA:
        return False
    if record.is_audited:
        return len(record.losses) > 1
    return record.non_finite_since != 0 or (record.first_non_finite or "").startswith(STEP)


def non_finite(record: Record) -> Finding:
    """Return the finding of the first value that is not finite."""
    where = record.first_non_finite or "loss"
    losses = dict(zip(record.steps_of_losses, record.losses, strict=False))
    bad = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
    step = bad if record.non_finite_since is None else record.non_finite_since
    before = [r.step for r in record.reports if r.step < (step or 0)]
    at = f" at {clip_norm(record):.2g}" * bool(record.gradient_norms)
    by_steps = (
        Advice("lower the learning rate", "rate*0.1"),
        Advice(f"clip the gradient's norm{at}", "clip"),
    )
    return Finding("non-finite", "act",
        f"Step {step or 0:,} is the first with values that are not finite. The first one is in: "
        f"{where}."
        # Values between measured steps are unknown.
        + (f" At step {before[-1]:,} all were finite." if before and not record.is_audited else ""),
        (Evidence(where, math.nan if bad is None else losses[bad], step=step),),
        (*by_steps * by_training(record),
         Advice(f"look for NaN and infinite entries in the batches up to step {step or 0:,}, and "
                "for log(0), x/0, sqrt(0) and half precision in the place named here")),
        "Replacing NaN by 0 (nan_to_num) hides where they come from.", since=step,
        against=())  # fmt: skip


@fault("unsafe-division", "Division by numbers close to zero",
       explains=(*LEARNING, "exploding", "non-finite", "row-spread"))  # fmt: skip
def unsafe_division(record: Record) -> Iterator[Finding]:
    """Find divisors of both signs, some close to zero, which make a few results huge."""
    for fact in record.found_by("unsafe-division"):
        close, times = fact.numbers["close"], fact.numbers["times"]
        uneven = any(finding.strength == "act" for finding in row_spread(record))
        if close < CLOSE and times > HUGE:
            yield Finding("unsafe-division", act_if(suffers(record) or uneven),
                f"{fact.place} divides by numbers of both signs, some of them close to zero: the "
                f"largest result is {times:.3g} times the median one.",
                (Evidence("smallest divisor over the median one", close, CLOSE),
                 Evidence("largest result over the median one", times, HUGE, step=0)),
                (Advice("divide by something positive, such as a norm"),),
                "A small constant added to the divisors only moves the zero.",
                against=())  # fmt: skip
