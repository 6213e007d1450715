"""Does the loss teach what it should?

Has it a slope at all; how does it weigh labels, classes, padding and penalties; has it a lower
bound; and is it lower for right outputs than for wrong ones?
"""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.course import (
    FAR_BELOW,
    FEWEST,
    course,
    falls_ever_faster,
    is_measure,
    is_unbounded,
)
from adiv_monitor.diagnosis.faults.fault import LEARNING, LONG_STEPS, fault, finds
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.states import cannot_overfit
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.record import Record

# ε of label smoothing; 0.1 is usual. From 0.5 on, at most about half of a target's weight is left
# for the right class.
SMOOTH = 0.5
# Slope of the logarithm of classes' weights over that of their counts: −1 balances them, 1 is that
# of counts in place of their inverses. Weights for other reasons correlate less with the counts.
GROWS, CORRELATED = 0.5, 0.9
# Share of padding in the places that count in the loss.
PADDING = 0.05
# By how much the loss, without the penalty, rises with exchanged inputs: in the run, over a copy
# trained without the penalty, and in that copy, over its loss. Healthy VAEs have 0.9 for the first.
LEARNT, LEARNABLE = 0.1, 0.02
# Share of the entries with a gradient that a clip keeps from coming back into its range.
STUCK = 0.2
# Cosine of the gradients of two terms, in each parameter tensor that both reach, and the ratio of
# the shorter to the longer gradient. Real and generated samples of a critic have −0.83 in all, and
# −0.26 in one tensor.
AGAINST, ALIKE = -0.95, 0.5


@fault("zero-slope", "A function that stops the gradient",
       explains=(*LEARNING, "stands-still", "target-scale", "vanishing"))  # fmt: skip
def zero_slope(record: Record) -> Iterator[Finding]:
    """Find functions of zero slope that keep the gradient from what comes before them."""
    facts = record.found_by("zero-slope")
    steps = [fact for fact in facts if fact.words["kind"] == "step"]
    if steps:
        yield Finding("zero-slope", "act" if record.wiring.zero_gradient else "watch",
            f"The slope of {steps[0].place} is zero everywhere: no gradient passes it.",
            (Evidence("functions whose slope is zero", len(steps), 0.0, step=0),),
            (Advice("use a smooth function in training, such as a sigmoid in place of rounding, or "
                    "pass the gradient through: x + (f(x) - x).detach()"),),
            "No learning rate trains layers that receive no gradient.",
            layers=record.wiring.zero_gradient, since=0)  # fmt: skip
    for fact in facts:
        share = fact.numbers.get("share", 0.0)
        if share > STUCK:
            yield Finding("zero-slope", "act" if suffers(record) else "watch",
                f"{fact.place} clips the outputs, and its slope is zero where it does: after "
                f"training, {share:.0%} of the outputs with a gradient are clipped although the "
                "loss would pull them back into the range.",
                (Evidence("share of the entries that get no gradient back", share, STUCK),),
                (Advice("give the loss the outputs as they are, or those of a smooth function, "
                        "such as a sigmoid for values from 0 to 1; clip them only where they are "
                        "used"),),
                "No learning rate moves an output that receives no gradient.", since=0)  # fmt: skip


@fault("zero-gradient", "Gradients of exactly zero", certain=True, explains=())
def zero_gradient(record: Record) -> Iterator[Finding]:
    """Find a loss whose gradient is zero for all parameters in every step."""
    norms = record.gradient_norms
    if len(norms) < FEWEST or any(norms) or not record.wiring.zero_gradient:
        return  # or no parameter is reached, which is another finding
    facts = record.found_by("zero-gradient")
    yield Finding("zero-gradient", "act",
        f"The gradient of the loss is exactly 0 for all parameters in all {len(norms)} steps, so "
        "no step has a direction."
        + (f" {facts[0].place} compares a tensor with itself: its loss is 0 whatever the model "
           "computes." if facts else ""),
        (Evidence("largest norm of a gradient", 0.0, 0.0),),
        (Advice("compare the outputs with the targets of the batch") if facts else
         Advice("look in the loss for a comparison of the outputs with themselves, for rounding "
                "and clamps, and for a margin that every sample already satisfies"),),
        "No learning rate moves weights without a gradient.", since=0)  # fmt: skip


@finds()
def compared_with_itself(record: Record) -> Iterator[Finding]:
    """Find a term of a loss that compares a tensor with itself, beside others with a gradient."""
    facts = record.found_by("zero-gradient")
    if facts and any(record.gradient_norms):
        yield Finding("zero-gradient", "act",
            f"{facts[0].place} compares a tensor with itself: both sides are equal to the last "
            "digit, also after training. This term of the loss is a constant and teaches nothing.",
            (Evidence("losses that compare a tensor with itself", len(facts), 0.0),),
            (Advice("compare the model's outputs with the targets, such as a teacher's outputs"),),
            "No learning rate makes a constant teach.", since=0)  # fmt: skip


@fault("label-smoothing", "Label smoothing that is too strong", explains=LEARNING)
def label_smoothing(record: Record) -> Iterator[Finding]:
    """Find label smoothing that leaves the right class less weight than all others together."""
    for fact in record.found_by("label-smoothing"):
        share, classes = fact.numbers["share"], fact.numbers["classes"]
        if share > SMOOTH:
            yield Finding("label-smoothing", _of_weights(record),
                f"{fact.place} uses a label smoothing of {share:.3g}: of {classes:.0f} classes, "
                f"the right one gets {1 - share + share / classes:.0%} of the target's weight.",
                (Evidence("label smoothing", share, SMOOTH, step=0),),
                (Advice("use label_smoothing=0.1 or less"),),
                "Another learning rate does not make the targets clearer.", since=0)  # fmt: skip


def _of_weights(record: Record) -> Strength:
    """Return "act" if the run suffers, or can't even overfit one small batch."""
    stays = any(finding.strength == "act" for finding in cannot_overfit(record))
    return "act" if suffers(record) or stays else "watch"


@fault("class-weights", "Class weights that grow with the counts", explains=LEARNING)
def class_weights(record: Record) -> Iterator[Finding]:
    """Find weights of classes that grow with their counts, so that rare classes count even less."""
    for fact in record.found_by("class-weights"):
        numbers, words = fact.numbers, fact.words
        if numbers["slope"] > GROWS and numbers["correlation"] > CORRELATED:
            yield Finding("class-weights", _of_weights(record),
                f"{fact.place} weights class {words['common']} {numbers['times']:.3g} times as "
                f"much as class {words['rare']}, of which there are fewer samples already, by "
                f"{numbers['more']:.3g} times: the weights grow with the counts.",
                (Evidence("slope of log weight over log count, of classes", numbers["slope"], GROWS,
                          step=0),),
                (Advice("weight each class by the inverse of its count: counts.sum() / counts; for "
                        "pos_weight, the number of negative targets over that of positive ones"),),
                since=0)  # fmt: skip


@fault("class-untaught", "Classes without a gradient", explains=LEARNING)
def class_untaught(record: Record) -> Iterator[Finding]:
    """Find classes of which no sample has a gradient."""
    if facts := record.found_by("class-untaught"):
        named = ", ".join(f"{fact.numbers['class']:g}" for fact in facts)
        samples = sum(fact.numbers["samples"] for fact in facts)
        yield Finding("class-untaught", _of_weights(record),
            f"No sample with label {named} has a gradient at the outputs, neither before nor after "
            f"training: {samples:.0f} of {facts[0].numbers['of']:.0f} samples teach nothing.",
            (Evidence("samples with a gradient, of these classes", 0.0, step=0),),
            (Advice("check what the loss expects as labels, such as −1 and 1 instead of 0 and 1, "
                    "and whether a weight, a mask or an ignore_index leaves these samples out"),),
            "More samples of these labels would teach nothing either.", since=0,
            against=())  # fmt: skip


@fault("padding-counts", "Padding counts in the loss")
def padding_counts(record: Record) -> Iterator[Finding]:
    """Find padding that counts in the loss as the other places do."""
    for fact in record.found_by("padding-counts"):
        share = fact.numbers["share"]
        if share > PADDING:
            yield Finding("padding-counts", "watch",
                f"{share:.0%} of the places that count in the loss are padding, whose targets are "
                "all the same: the loss is lower than that of the real places.",
                (Evidence("share of padding in the places that count", share, PADDING, step=0),),
                (Advice("leave padding out of the loss: ignore_index, or the sum over real places "
                        "divided by their number"),),
                "A lower loss does not show that the real places are predicted better.", since=0,
                against=())  # fmt: skip


@fault("penalty-dominates", "A penalty dominates the loss", explains=LEARNING)
def penalty_dominates(record: Record) -> Iterator[Finding]:
    """Find a penalty that keeps the terms beside it from learning anything of the inputs."""
    for fact in record.found_by("penalty-dominates"):
        numbers = fact.numbers
        run, copy = numbers["with"], numbers["without"]
        if copy > LEARNABLE * abs(numbers["others"]) and run < LEARNT * copy:
            yield Finding("penalty-dominates", _of_weights(record),
                "The terms of the loss that do not depend on which input belongs to which target, "
                f"{numbers['penalty']:.3g} at first and {numbers['penalty after']:.3g} at the end, "
                "keep the others from learning it: if inputs are exchanged between samples, the "
                f"others rise by {run:.2g}, but by {copy:.2g} in a copy that was trained without "
                "these terms.",
                (Evidence("rise of the other terms with exchanged inputs", run, LEARNT * copy),),
                (Advice("give these terms far smaller weights, or raise them from zero over the "
                        "first steps; check whether they are sums where the others are means"),),
                "Another learning rate does not change the weights of the terms.")  # fmt: skip


@fault("unbounded-loss", "A loss without a lower bound", of="monitor",
       explains=(*LEARNING, *LONG_STEPS))  # fmt: skip
def negated(record: Record) -> Iterator[Finding]:
    """Find steps that go up the loss, which then has no bound."""
    seen = [report.loss_gradients for report in record.reports if report.loss_gradients]
    if not seen or not all(max(gradients) < 0 for gradients in seen) or not seen[0]:
        return
    yield Finding("unbounded-loss",
        "act" if course(record) == "rises" and is_measure(record) else "note",
        "The steps raise the loss, since backward() begins at its negative: it has no bound in "
        "that direction.",
        (Evidence("gradient at the loss", seen[0][0], 0.0, step=record.reports[0].step),),
        (Advice("call backward() on the loss itself, not on its negative"),),
        "A lower learning rate only goes up more slowly.")  # fmt: skip


@finds()
def unbounded(record: Record) -> Iterator[Finding]:
    """Find a loss without a lower bound: it falls ever faster, or keeps falling on a straight line.

    The line is that from the first weights through the last ones.
    """
    if not any(map(math.isfinite, record.losses)) or not is_unbounded(record):
        return
    summary, evidence = _fall(record)
    facts = record.found_by("unbounded-loss")
    negative = int(facts[0].numbers.get("negative", 0)) if facts else 0
    samples = (f"{negative} samples of the first batch have a" if negative > 1 else
               "1 sample of the first batch has a")  # fmt: skip
    yield Finding("unbounded-loss", "watch" if negative else "act",
        f"{summary} {samples} negative weight: the lower what it multiplies, the lower the loss, "
        "without end." if negative else
        f"{summary} A lower loss does not show that the model learns.",
        (evidence,),
        (Advice("if the weights are rewards or advantages, judge the training by the mean reward, "
                "and draw new samples from the policy after each step or bound its change (PPO); "
                "else look where the signs come from" if negative else
                "look for a term with the wrong sign (an error or a penalty that is subtracted "
                "instead of added), and for a learnt variance or temperature without a lower "
                "limit"),),
        "Another learning rate only changes how fast the loss falls.")  # fmt: skip


def _fall(record: Record) -> tuple[str, Evidence]:
    """Return how an unbounded loss falls: ever faster, at another learning rate, or on a line."""
    lowest = min(filter(math.isfinite, record.losses))
    losses = f"{record.losses[0]:.3g} at first, {lowest:.3g} at the end"
    limit = -FAR_BELOW * max(1.0, abs(record.losses[0]))
    if falls_ever_faster(record):
        said = f"The loss falls without bound, ever faster: {losses}."
        return said, Evidence("loss", lowest, limit)
    if facts := record.found_by("unbounded-loss"):
        loss, times = facts[0].numbers["loss"], facts[0].numbers["times"]
        said = (f"The loss has no lower bound: {losses}, and {loss:.3g} if the weights of a copy "
                f"move {times:.0f} times as far in the same direction.")  # fmt: skip
        return said, Evidence("loss of weights moved further", loss, 0.0)
    rate = min(record.rates, key=lambda factor: record.rates[factor].loss)
    far = record.rates[rate].loss
    said = (f"The loss has no lowest value: {losses}, and {far:.3g} at {rate:g} times "
            "the learning rate.")  # fmt: skip
    return said, Evidence("loss at another learning rate", far, limit)


@fault("loss-reversed", "The loss rewards wrong outputs", certain=True,
       explains=(*LEARNING, "vanishing"))  # fmt: skip
def loss_reversed(record: Record) -> Iterator[Finding]:
    """Find a loss that is lower, the more the outputs contradict the targets."""
    for fact in record.found_by("loss-reversed"):
        right, wrong = fact.numbers["right"], fact.numbers["wrong"]
        is_signed = fact.words["outputs"] == "signed"
        yield Finding("loss-reversed", "act" if is_signed else "watch",
            f"The loss is {wrong:.3g} if the outputs contradict all targets, and {right:.3g} if "
            "they agree with all: "
            + ("training makes the predictions worse." if is_signed else
               "unless they are distances or energies, training makes them worse."),
            (Evidence("loss of outputs that contradict all targets", wrong, right),),
            (Advice("look for a wrong sign: an overlap or a likelihood that is minimised, where 1 "
                    "minus the overlap, or the negative, should be; labels that are read the wrong "
                    "way round"),),
            "Another learning rate does not turn the loss round.", since=0)  # fmt: skip


@fault("term-without-graph", "A term of the loss without a gradient",
       explains=(*LEARNING, "unbounded-loss"))  # fmt: skip
def term_without_graph(record: Record) -> Iterator[Finding]:
    """Find terms of the loss that depend on parameters and have no gradient."""
    for fact in record.found_by("term-without-graph"):
        value, loss = fact.numbers["value"], fact.numbers["loss"]
        badly = suffers(record) or is_unbounded(record)
        yield Finding("term-without-graph", "act" if badly else "watch",
            f"{fact.place} adds {value:.3g} to the loss, {loss:.3g} in all. This term depends on "
            "the parameters, but has no gradient: it changes the loss, and no step.",
            (Evidence("value of the term that has no gradient", value, step=0),),
            (Advice("compute the term with a graph: no detach(), item() or no_grad() on its way, "
                    "and create_graph=True in the torch.autograd.grad() of a gradient penalty; if "
                    "only its value is wanted, log it and leave it out of the loss"),),
            "No learning rate makes a term count that has no gradient.", since=0)  # fmt: skip


@fault("terms-opposed", "Terms of the loss that cancel each other", explains=LEARNING)
def terms_opposed(record: Record) -> Iterator[Finding]:
    """Find two terms of the loss whose gradients cancel each other."""
    for fact in record.found_by("terms-opposed"):
        numbers, other = fact.numbers, fact.words["other"]
        if numbers["largest"] < AGAINST and numbers["ratio"] > ALIKE:
            places = fact.place if fact.place == other else f"{fact.place} and {other}"
            yield Finding("terms-opposed", "act",
                f"Two terms of the loss are opposed, from {places}: the cosine of their gradients "
                f"is {numbers['cosine']:.3g}, and the shorter one has {numbers['ratio']:.0%} of "
                "the other's length. They cancel each other.",
                (Evidence("largest cosine of the two gradients, of a parameter tensor",
                          numbers["largest"], AGAINST, step=0),),
                (Advice("give each player its own loss: detach the generated samples in the "
                        "discriminator's loss, and let the generator's loss train the generator "
                        "only; else look for a term that is added with both signs"),),
                "Another learning rate does not change what is left of two opposed gradients.",
                since=0)  # fmt: skip
