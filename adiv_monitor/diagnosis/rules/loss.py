"""Rules about the loss itself: symptoms whose cause other rules may find."""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.course import (
    FAR_BELOW,
    FEWEST,
    STILL,
    end,
    falls_ever_faster,
    fell,
    fell_little,
    is_long_enough,
    is_measure,
    is_unbounded,
    may_have_fallen,
    noise,
    rose,
    start,
    tells_nothing,
)
from adiv_monitor.diagnosis.finding import HIGHER_RATES, RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.phases import LOOK_AGAIN, RISES_YET, at_peak, still_rises
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.rates import suffers
from adiv_monitor.diagnosis.rules.remedies import usual_factor
from adiv_monitor.printable import quoted

# Share of the entries with a gradient that a clip keeps from coming back into its range.
STUCK = 0.2
# Share of the first loss that is left after overfitting one small batch.
NOT_BY_HEART = 0.5
_LACK = {
    "relu": "are never negative, and receive no gradient where they are zero",
    "relu6": "lie between 0 and 6, and receive no gradient at 0 and at 6",
    "sigmoid": "lie between 0 and 1",
    "hardsigmoid": "lie between 0 and 1",
    "tanh": "lie between −1 and 1",
    "hardtanh": "lie between two bounds, and receive no gradient at the bounds",
    "softsign": "lie between −1 and 1",
}
# A small network explains more than this share of unseen labels, and the model less than this share
# of what that explains; labels that a model of theirs explains so little of, with so many samples
# of each class, may not belong to their inputs.
EXPLAINS, BEHIND, LEARNT, PER_CLASS = 0.3, 0.25, 0.15, 20
_NO_MEASURE = (
    " That is no fault of generative adversarial networks, of reinforcement learning, or of a run "
    "that was resumed."
)
LEAST_STEPS = 50  # fewest steps of the attempt to overfit; slow runs try fewer


def double_softmax(record: Record) -> Iterator[Finding]:
    """Find probabilities whose softmax the loss takes again, so that it can't come near zero."""
    output = record.activated_output
    in_loss = output is not None and output.function == "softmax" and output.module is None
    if record.double_softmax or (output is not None and output.function == "softmax"):
        given = (
            "The loss function takes a softmax of the outputs"
            if in_loss
            else ("The model's outputs are already probabilities")
        )
        yield Finding(
            "double-softmax",
            (),
            "act",
            (Evidence("number of softmaxes before that of the loss", 1.0),),
            (Advice("pass the inputs of the softmax to the loss, not its outputs",
                    "plain-outputs"),),
            f"{given}, and the loss applies a second softmax "
            "to them: they differ by at most 1 between classes, so the loss can't come near zero.",
            "A higher learning rate only saturates the first softmax.",
            0,
            HIGHER_RATES,
        )  # fmt: skip


def activated_logits(record: Record) -> Iterator[Finding]:
    """Find an activation function between the last layer and a loss that has its own."""
    output = record.activated_output
    if output is None or output.function == "softmax":
        return
    where = f"the {output.function} of {quoted(output.module or '')}"
    yield Finding(
        "activated-logits",
        (output.module,) if output.module else (),
        "act",
        (Evidence("number of activation functions on the logits", 1.0),),
        (Advice("remove that function from the outputs: the loss already contains a softmax (or "
                "sigmoid)", "plain-outputs"),),
        f"The loss uses the outputs of {where} as logits. Such logits "
        f"{_LACK.get(output.function, 'are bounded on one side')}.",
        "Another learning rate does not widen the range of the logits.",
        0,
        RATES,
    )  # fmt: skip


def zero_slope(record: Record) -> Iterator[Finding]:
    """Find functions of zero slope that keep the gradient from what comes before them."""
    facts = record.found_by("zero-slope")
    steps = [fact for fact in facts if fact.words["kind"] == "step"]
    if steps:
        yield Finding(
            "zero-slope",
            record.wiring.zero_gradient,
            "act" if record.wiring.zero_gradient else "watch",
            (Evidence("functions whose slope is zero", len(steps), 0.0, step=0),),
            (Advice("use a smooth function in training, such as a sigmoid in place of rounding, or "
                    "pass the gradient through: x + (f(x) - x).detach()"),),
            f"The slope of {steps[0].place} is zero everywhere: no gradient passes it.",
            "No learning rate trains layers that receive no gradient.",
            0,
            RATES,
        )  # fmt: skip
    for fact in facts:
        share = fact.numbers.get("share", 0.0)
        if share > STUCK:
            yield Finding(
                "zero-slope",
                (),
                "act" if suffers(record) else "watch",
                (Evidence("share of the entries that get no gradient back", share, STUCK),),
                (Advice("give the loss the outputs as they are, or those of a smooth function, "
                        "such as a sigmoid for values from 0 to 1; clip them only where they are "
                        "used"),),
                f"{fact.place} clips the outputs, and its slope is zero where it does: after "
                f"training, {share:.0%} of the outputs with a gradient are clipped although the "
                "loss would pull them back into the range.",
                "No learning rate moves an output that receives no gradient.",
                0,
                RATES,
            )  # fmt: skip


def zero_gradient(record: Record) -> Iterator[Finding]:
    """Find a loss whose gradient is zero for all parameters in every step."""
    norms = record.gradient_norms
    if len(norms) < FEWEST or any(norms) or not record.wiring.zero_gradient:
        return  # or no parameter is reached, which is another finding
    facts = record.found_by("zero-gradient")
    where = (
        f" {facts[0].place} compares a tensor with itself: its loss is 0 whatever the model "
        "computes."
        if facts
        else ""
    )
    yield Finding(
        "zero-gradient",
        (),
        "act",
        (Evidence("largest norm of a gradient", 0.0, 0.0),),
        (
            Advice("compare the outputs with the targets of the batch")
            if facts else
            Advice("look in the loss for a comparison of the outputs with themselves, for rounding "
                   "and clamps, and for a margin that every sample already satisfies"),
        ),
        f"The gradient of the loss is exactly 0 for all parameters in all {len(norms)} steps, so "
        f"no step has a direction.{where}",
        "No learning rate moves weights without a gradient.",
        0,
        RATES,
    )  # fmt: skip


def unbounded(record: Record) -> Iterator[Finding]:
    """Find a loss without a lower bound: it falls ever faster, or keeps falling on a straight line.

    The line is that from the first weights through the last ones.
    """
    if not any(map(math.isfinite, record.losses)) or not is_unbounded(record):
        return
    summary, evidence = _fall(record)
    facts = record.found_by("unbounded-loss")
    negative = int(facts[0].numbers.get("negative", 0)) if facts else 0
    samples = (
        "1 sample of the first batch has a"
        if negative == 1
        else (f"{negative} samples of the first batch have a")
    )
    yield Finding(
        "unbounded-loss",
        (),
        "watch" if negative else "act",
        (evidence,),
        (
            Advice("if the weights are rewards or advantages, judge the training by the mean "
                   "reward, and draw new samples from the policy after each step or bound its "
                   "change (PPO); else look where the signs come from" if negative
                   else "look for a term with the wrong sign (an error or a penalty that is "
                   "subtracted instead of added), and for a learnt variance or temperature without "
                   "a lower limit"),
        ),
        f"{summary} {samples} negative weight: the lower what it multiplies, the lower the loss, "
        "without end." if negative
        else f"{summary} A lower loss does not show that the model learns.",
        "Another learning rate only changes how fast the loss falls.",
        against=RATES,
    )  # fmt: skip


def _fall(record: Record) -> tuple[str, Evidence]:
    """Return how an unbounded loss falls: ever faster, at another learning rate, or on a line."""
    lowest = min(filter(math.isfinite, record.losses))
    course = f"{record.losses[0]:.3g} at first, {lowest:.3g} at the end"
    limit = -FAR_BELOW * max(1.0, abs(record.losses[0]))
    if falls_ever_faster(record):
        return (
            f"The loss falls without bound, ever faster: {course}.",
            Evidence("loss", lowest, limit),
        )
    if facts := record.found_by("unbounded-loss"):
        loss, times = facts[0].numbers["loss"], facts[0].numbers["times"]
        return (
            f"The loss has no lower bound: {course}, and {loss:.3g} if the weights of a copy move "
            f"{times:.0f} times as far in the same direction.",
            Evidence("loss of weights moved further", loss, 0.0),
        )
    rate = min(record.rates, key=lambda factor: record.rates[factor].loss)
    far = record.rates[rate].loss
    return (
        f"The loss has no lowest value: {course}, and {far:.3g} at {rate:g} times the learning "
        "rate.",
        Evidence("loss at another learning rate", far, limit),
    )


def cannot_overfit(record: Record) -> Iterator[Finding]:
    """Find a model that can't even overfit one small batch."""
    trial = record.overfit
    if trial is None or trial.steps < LEAST_STEPS or not math.isfinite(start(record)):
        return
    if tells_nothing(record):
        return
    left = trial.loss / start(record) if start(record) > 0 else math.nan
    if left > NOT_BY_HEART:
        yield Finding(
            "cannot-overfit",
            (),
            "watch" if trial.falls else "act",
            (Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * start(record)),),
            (
                Advice("print the inputs and outputs of each function, from one batch to its loss: "
                       "the audit tests for many causes, and found none of them"),
            ),
            f"After {trial.steps} steps on one small batch, the loss of this batch is still "
            f"{trial.loss:.3g}"
            + (", and falling: the model overfits it only slowly." if trial.falls
               else ": the model does not overfit it."),
            "More data do not help a model that can't learn a few samples." * (not trial.falls),
        )  # fmt: skip


def behind_reference(record: Record) -> Iterator[Finding]:
    """Find a model that explains far less of the labels than a small network does.

    This is a symptom of any fault.
    """
    for fact in record.found_by("behind-reference"):
        # Predictions that are worse than a constant explain nothing: their share is negative.
        reference, own = fact.numbers["reference"], max(0.0, fact.numbers["model"])
        if reference > EXPLAINS and own < BEHIND * reference and not tells_nothing(record):
            yield Finding(
                "behind-reference",
                (),
                "watch",
                (Evidence("share of the labels that the model explains", own, BEHIND * reference),),
                (Advice("start from a model, a loss and an optimizer that work on these data, and "
                        "exchange one of them at a time"),),
                f"A small network explains {reference:.0%} of the labels of samples that it was "
                f"not trained on. This model explains {own:.0%} of them, although it was trained "
                "on them. So the fault is in the model, the loss or the optimizer, not in the "
                "data; the audit can't tell in which of them.",
                "More data do not help: a small network learns from these.",
                against=(),
            )  # fmt: skip


def labels_unrelated(record: Record) -> Iterator[Finding]:
    """Find labels that neither a small network nor the model predicts better than by chance."""
    for fact in record.found_by("behind-reference"):
        reference, own, error = (fact.numbers[name] for name in ("reference", "model", "error"))
        enough = fact.numbers["per class"] >= PER_CLASS
        if enough and reference <= error and own <= max(error, LEARNT):
            yield Finding(
                "labels-unrelated",
                (),
                "watch",
                (Evidence("share of unseen labels that a small network explains", reference,
                          error),),
                (Advice("look at ten samples and their labels"),),
                "Neither a small network nor this model predicts the labels of "
                f"{fact.numbers['held out']:.0f} samples better than a constant prediction does. "
                "Check whether the labels belong to their inputs. If they do, the task is too hard "
                "to learn from so few samples.",
                against=(),
            )  # fmt: skip


def loss_stuck(record: Record) -> Iterator[Finding]:
    """Find a loss that does not fall, ends no lower than a constant prediction's, or is unclear.

    A monitor can't know whether a loss is a measure of the training. It is one if it is positive,
    and this optimizer alone trains, from the first step; else the finding is a note. So it is if
    the loss fell a little: much of it may be what no model can predict.
    """
    if not is_long_enough(record) or not math.isfinite(end(record)) or tells_nothing(record):
        return
    no_lower = end(record) > (1 - STILL) * start(record) > 0
    if fell(record) and not no_lower:
        return
    unclear = may_have_fallen(record) and not no_lower
    if unclear and not record.is_audited:
        return
    rises = still_rises(record.reports)
    ends_higher = end(record) > (1 + STILL) * record.losses[0] > 0
    factor = usual_factor(move.value for move in by_layer(at_peak(record), "update_ratio").values())
    factors = [0.1] if ends_higher else [10.0, 0.1] if record.is_audited else []
    if factor is not None and factor > 10:  # layers hardly move, whatever the loss does
        factors = [factor]
    advice = tuple(Advice(f"learning rate × {f:g}", f"rate*{f:g}") for f in factors)
    if rises:
        advice = (Advice(LOOK_AGAIN),)
    elif unclear:
        advice = (Advice("train for more steps: the mean over more batches has less noise"),)
    elif not advice:
        advice = (Advice("run adiv-audit: it looks for the cause, and tries learning rates"),)
    told = record.is_audited or is_measure(record)
    little = not record.is_audited and fell_little(record)
    yield Finding(
        "loss-stuck",
        (),
        "note" if unclear or rises or little or not told else "watch",
        (Evidence("loss", end(record), start(record)), *_overfits(record)),
        advice,
        _stuck(record, no_lower=no_lower) + RISES_YET * rises + _NO_MEASURE * (not told),
    )


def _stuck(record: Record, *, no_lower: bool) -> str:
    course = f"{record.losses[0]:.3g} at first, {end(record):.3g} at the end"
    if may_have_fallen(record) and not no_lower:
        return (
            f"{len(record.losses)} steps do not show whether the loss falls: it is {course}, and "
            f"differs by {noise(record):.3g} from batch to batch."
        )
    said = "does not fall"
    if rose(record):
        said = "rises"
    elif not record.is_audited and fell_little(record):
        said = f"falls by less than {STILL:.0%}"
    elif (fell(record) or may_have_fallen(record)) and start(record) == record.chance:
        said = f"ends no lower than {record.chance:.3g}, the loss of a constant prediction"
    elif fell(record) or may_have_fallen(record):
        said = "ends no lower than it began"
    overfits = " However, the model overfits one small batch." * bool(list(_overfits(record)))
    return f"The loss {said}: {course}.{overfits}"


def _overfits(record: Record) -> Iterator[Evidence]:
    """Yield evidence that the model fits one small batch although it does not fit many."""
    trial = record.overfit
    if trial is not None and trial.loss < NOT_BY_HEART * start(record):
        yield Evidence("loss of one small batch", trial.loss, NOT_BY_HEART * start(record))
