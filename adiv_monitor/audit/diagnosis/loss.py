"""Rules about the loss itself: symptoms, whose cause other rules may know."""

import math
from collections.abc import Iterator

from adiv_monitor.audit.diagnosis.course import (
    STILL,
    end,
    fell,
    is_long_enough,
    is_opposed,
    rose,
    start,
)
from adiv_monitor.audit.finding import Advice, Evidence, Finding
from adiv_monitor.audit.record import Record

# Of the first loss, what is left after learning one small batch by heart.
NOT_BY_HEART = 0.5
_LACK = {
    "relu": "are never below zero, and get no gradient where they are zero",
    "relu6": "lie between 0 and 6, and get no gradient at the ends",
    "sigmoid": "lie between 0 and 1",
    "hardsigmoid": "lie between 0 and 1",
    "tanh": "lie between −1 and 1",
    "hardtanh": "lie within bounds, and get no gradient there",
    "softsign": "lie between −1 and 1",
}
LEAST_STEPS = 50  # in which it must be learnt; where steps are slow, fewer are tried


def double_softmax(record: Record) -> Iterator[Finding]:
    """Probabilities whose softmax the loss takes again: it can't come near zero."""
    if record.double_softmax:
        yield Finding(
            "double-softmax",
            (),
            "act",
            (Evidence("outputs are probabilities, and the loss takes their softmax", 1.0),),
            (Advice("give the loss what goes into the softmax, not what comes out",
                    "plain-outputs"),),
            "The model's outputs are probabilities already, and the loss takes their softmax once "
            "more: differences between classes are at most 1, so it can't come near zero.",
            "A higher learning rate only saturates the first softmax.",
            0,
        )  # fmt: skip


def activated_logits(record: Record) -> Iterator[Finding]:
    """An activation function between the last layer and a loss that has one of its own."""
    output = record.activated_output
    if output is None or output.function == "softmax":
        return
    where = f"the {output.function} of {output.module or 'the model'}"
    yield Finding(
        "activated-logits",
        (output.module,) if output.module else (),
        "act",
        (Evidence(f"the loss takes the outputs of {where} for logits", 1.0),),
        (Advice("take that function off the outputs: the loss has a softmax (or sigmoid) of its "
                "own", "plain-outputs"),),
        f"What goes into the loss's softmax (or sigmoid) comes out of {where}: logits that "
        f"{_LACK.get(output.function, 'are bounded on one side')}.",
        "Another learning rate gives the loss no logits that the function can't.",
        0,
    )  # fmt: skip


def cannot_overfit(record: Record) -> Iterator[Finding]:
    """The model can't even learn one small batch by heart."""
    trial = record.overfit
    if trial is None or trial.steps < LEAST_STEPS or not math.isfinite(start(record)):
        return
    if is_opposed(record):
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
    """The loss does not fall, or no lower than that of knowing nothing."""
    if not is_long_enough(record) or not math.isfinite(end(record)) or is_opposed(record):
        return
    knows_nothing = end(record) > (1 - STILL) * start(record) > 0
    if fell(record) and not knows_nothing:
        return
    yield Finding(
        "loss-stuck",
        (),
        "watch",
        (Evidence("loss", end(record), start(record)), *_by_heart(record)),
        (
            Advice("learning rate × 10", "rate*10"),
            Advice("learning rate × 0.1", "rate*0.1"),
        ),
        _stuck(record),
        "",
    )


def _stuck(record: Record) -> str:
    course = f"{record.losses[0]:.3g} at first, {end(record):.3g} at the end"
    said = "rises" if rose(record) else "does not fall"
    if fell(record):
        said = f"falls no lower than {start(record):.3g}, that of knowing nothing"
    related = (
        " It learns a few samples by heart, though: look whether labels belong to their inputs."
    ) * bool(list(_by_heart(record)))
    return f"The loss {said}: {course}.{related}"


def _by_heart(record: Record) -> Iterator[Evidence]:
    """That what many batches do not teach a small one does: labels may have no relation to inputs.

    It is no proof: a short run does not tell them from a relation that is hard to learn.
    """
    trial = record.overfit
    if trial is not None and trial.loss < NOT_BY_HEART * start(record):
        yield Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * start(record))
