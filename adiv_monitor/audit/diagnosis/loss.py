"""Rules about the loss itself: symptoms, whose cause other rules may know."""

import math
from collections.abc import Iterator

from adiv_monitor.audit.diagnosis.course import end, fell, is_long_enough, rose, start
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# Of the first loss, what is left after learning one small batch by heart.
NOT_BY_HEART = 0.5
LEAST_STEPS = 50  # in which it must be learnt; where steps are slow, fewer are tried


def double_softmax(record: Record) -> Iterator[Finding]:
    """Probabilities whose softmax the loss takes again: it can't come near zero."""
    if record.double_softmax:
        yield Finding(
            "double-softmax",
            (),
            "act",
            (Evidence("outputs are probabilities, and the loss takes their softmax", 1.0),),
            (Advice("give the loss what goes into the softmax, not what comes out"),),
            "The model's outputs are probabilities already, and the loss takes their softmax once "
            "more: differences between classes are at most 1, so it can't come near zero.",
            "A higher learning rate only saturates the first softmax.",
            0,
        )


def cannot_overfit(record: Record) -> Iterator[Finding]:
    """The model can't even learn one small batch by heart."""
    trial = record.overfit
    if trial is None or trial.steps < LEAST_STEPS or not math.isfinite(start(record)):
        return
    left = trial.loss / start(record) if start(record) > 0 else math.nan
    if left > NOT_BY_HEART:
        yield Finding(
            "cannot-overfit",
            (),
            "watch" if trial.falls else "act",
            (Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * start(record)),),
            (
                Advice("look for labels that do not belong to their inputs, a loss that is not "
                       "about them, and activation functions on the outputs that the loss has "
                       "already"),
            ),
            f"After {trial.steps} steps on one small batch its loss is still {trial.loss:.3g}"
            + (", if falling: the model is slow to learn it by heart." if trial.falls
               else ": the model cannot learn it by heart."),
            "More data: the few there are can't be learnt.",
        )  # fmt: skip


def loss_stuck(record: Record) -> Iterator[Finding]:
    """The loss does not fall."""
    if not is_long_enough(record) or fell(record) or not math.isfinite(end(record)):
        return
    yield Finding(
        "loss-stuck",
        (),
        "watch",
        (Evidence("loss", end(record), record.losses[0]),),
        (
            Advice("learning rate × 10", "rate*10"),
            Advice("learning rate × 0.1", "rate*0.1"),
        ),
        f"The loss {'rises' if rose(record) else 'does not fall'}: {record.losses[0]:.3g} at "
        f"first, {end(record):.3g} at the end.",
        "",
    )
