"""Were numbers not finite before training began, or may they soon not be?

What became not finite in training is asked about in `states`.
"""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.fault import LEARNING, fault
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
    if _seen(record) and _not_by_training(record):
        yield _finding(record)


def _seen(record: Record) -> bool:
    return record.first_non_finite is not None or not all(map(math.isfinite, record.losses))


def _not_by_training(record: Record) -> bool:
    if record.first_non_finite == DATA:
        return True
    if record.is_audited:
        return len(record.losses) <= 1
    return record.non_finite_since == 0 and not (record.first_non_finite or "").startswith(STEP)


def _finding(record: Record) -> Finding:
    where = record.first_non_finite or "loss"
    bad = next((loss for loss in record.losses if not math.isfinite(loss)), math.nan)
    step = _since(record)
    if _not_by_training(record):
        advice = [Advice("look for NaN and infinite entries in the data, and for log(0), x/0 and "
                         "sqrt(0) in the code of the place named here")]  # fmt: skip
    else:
        at = f" at {clip_norm(record):.2g}" * bool(record.gradient_norms)
        # Batches between measured steps were not observed.
        batches = f"look for NaN and infinite entries in the batches up to step {step or 0:,}"
        advice = [Advice("lower the learning rate", "rate*0.1"),
                  Advice(f"clip the gradient's norm{at}", "clip"),
                  *[Advice(batches)] * (not record.is_audited),
                  Advice("look for log(0), x/0, sqrt(0) and half precision in the code of the "
                         "place named here")]  # fmt: skip
    return Finding("non-finite", "act",
        f"{_seen_when(record, step)}. The first one is in: {where}.",
        (Evidence(where, bad, step=step),), tuple(advice),
        "Replacing NaN by 0 (nan_to_num) hides where they come from.", since=step,
        against=())  # fmt: skip


def _since(record: Record) -> int | None:
    """Return the step at which a value was first observed not to be finite; None if unknown."""
    if record.non_finite_since is not None:
        return record.non_finite_since
    losses = zip(record.steps_of_losses, record.losses, strict=True)
    return next((step for step, loss in losses if not math.isfinite(loss)), None)


def _seen_when(record: Record, step: int | None) -> str:
    if not record.is_audited:  # values between measured steps, and after them, are unknown
        is_loss = record.first_non_finite == "the loss"
        # Norms are roots of sums of squares, which overflow earlier than the values.
        kind = "" if is_loss else " (NaN, infinite or too large to square)"
        before = [r.step for r in record.reports if r.step < (step or 0)]
        after = "" if is_loss or not before else f"; at step {before[-1]:,} all were finite"
        return f"Step {step or 0:,} is the first with values that are not finite{kind}{after}"
    if len(record.losses) <= 1:
        return "Some values are not finite before the first step"
    return f"Some values are not finite after {step or len(record.losses)} steps"


@fault("unsafe-division", "Division by numbers close to zero",
       explains=(*LEARNING, "exploding", "non-finite", "row-spread"))  # fmt: skip
def unsafe_division(record: Record) -> Iterator[Finding]:
    """Find divisors of both signs, some close to zero, which make a few results huge."""
    for fact in record.found_by("unsafe-division"):
        close, times = fact.numbers["close"], fact.numbers["times"]
        uneven = any(finding.strength == "act" for finding in row_spread(record))
        if close < CLOSE and times > HUGE:
            yield Finding("unsafe-division", "act" if suffers(record) or uneven else "watch",
                f"{fact.place} divides by numbers of both signs, some of them close to zero: the "
                f"largest result is {times:.3g} times the median one, and changes its sign with "
                "the least change of the divisor.",
                (Evidence("smallest size of the divisors over the median one", close, CLOSE,
                          step=0),
                 Evidence("largest result over the median one", times, HUGE, step=0)),
                (Advice("divide by something positive: a norm, a standard deviation, or "
                        "softplus(x) + 0.1"),),
                "A small constant added to the divisors only moves the zero.", since=0,
                against=())  # fmt: skip
