"""Rules about values that are not finite."""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.remedies import clip_norm

STEP = "the update"  # as what was not finite begins where the optimizer made it
DATA = "data"  # where `Record.first_non_finite` puts what came with a batch


def non_finite_from_the_start(record: Record) -> Iterator[Finding]:
    """In the data, or before the first step has changed anything: weights, or the loss itself."""
    if _seen(record) and _not_by_training(record):
        yield _finding(record)


def became_non_finite(record: Record) -> Iterator[Finding]:
    """After training for a while: what else was found is likely the cause."""
    if _seen(record) and not _not_by_training(record):
        yield _finding(record)


def _seen(record: Record) -> bool:
    return record.first_non_finite is not None or not all(map(math.isfinite, record.losses))


def _not_by_training(record: Record) -> bool:
    if record.first_non_finite == DATA:
        return True
    if record.is_audited:
        return len(record.losses) <= 1
    return record.non_finite_since == 0 and not (record.first_non_finite or "").startswith(STEP)


def _since(record: Record) -> int | None:
    """The step at which it was seen first; None: not known."""
    if record.non_finite_since is not None:
        return record.non_finite_since
    losses = zip(record.steps_of_losses, record.losses, strict=True)
    return next((step for step, loss in losses if not math.isfinite(loss)), None)


def _finding(record: Record) -> Finding:
    where = record.first_non_finite or "loss"
    bad = next((loss for loss in record.losses if not math.isfinite(loss)), math.nan)
    step = _since(record)
    advice: tuple[Advice, ...]
    if _not_by_training(record):
        advice = (
            Advice("look at the data for NaN and infinite entries, and in the first place named "
                   "for log(0), x/0, sqrt(0)"),
        )  # fmt: skip
    else:
        advice = (
            Advice("lower the learning rate", "rate*0.1"),
            Advice(
                "clip the gradient's norm"
                + f" at {clip_norm(record):.2g}" * bool(record.gradient_norms),
                "clip",
            ),
            *_of_the_data(record, step),
            Advice("in the place named, look for log(0), x/0, sqrt(0), and half precision"),
        )
    return Finding(
        "non-finite",
        (),
        "act",
        (Evidence(where, bad, step=step),),
        advice,
        f"{_seen_when(record, step)}; first in: {where}.",
        "Replacing NaN by 0 (nan_to_num) hides where they come from.",
        step,
    )


def _of_the_data(record: Record, step: int | None) -> Iterator[Advice]:
    """Where nobody saw the data of the steps between: one batch may have done it."""
    if not record.is_audited:
        yield Advice(f"look at the batches up to step {step or 0:,} for NaN and infinite entries")


def _seen_when(record: Record, step: int | None) -> str:
    if not record.is_audited:  # what came between measured steps, and after them, is not known
        is_loss = record.first_non_finite == "the loss"
        # Lengths are roots of sums of squares.
        kind = "" if is_loss else " (NaN, infinite or too large to square)"
        before = [r.step for r in record.reports if r.step < (step or 0)]
        after = "" if is_loss or not before else f", after step {before[-1]:,} was finite"
        return f"Values that are not finite{kind} were seen first at step {step or 0:,}{after}"
    if len(record.losses) <= 1:
        return "Values are not finite before the first step"
    return f"Values are not finite after {step or len(record.losses)} steps"
