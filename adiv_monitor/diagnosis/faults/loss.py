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
from adiv_monitor.diagnosis.faults.fault import LEARNING, LONG_STEPS, act_if, fault, finds
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.states import cannot_overfit
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.record import Record

# ε of label smoothing; 0.1 is usual. From 0.5 on, at most about half of a target's weight is left
# for the right class.
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
    if steps := [fact for fact in facts if fact.words["kind"] == "step"]:
        yield Finding("zero-slope", act_if(record.wiring.zero_gradient),
            f"The slope of {steps[0].place} is zero everywhere: no gradient passes it.",
            (Evidence("functions whose slope is zero", len(steps), 0.0, step=0),),
            (Advice("use a smooth function, or pass gradients: x + (f(x) - x).detach()"),),
            layers=record.wiring.zero_gradient)  # fmt: skip
    for fact in facts:
        if (share := fact.numbers.get("share", 0.0)) > STUCK:
            yield Finding("zero-slope", act_if(suffers(record)),
                f"{fact.place} clips the outputs: after training, {share:.0%} of the outputs with "
                "a gradient are clipped although the loss would pull them back into the range.",
                (Evidence("share of the entries that get no gradient back", share, STUCK),),
                (Advice("clip outputs only where they are used, not in the loss"),))  # fmt: skip


@fault("zero-gradient", "Gradients of exactly zero", certain=True)
def zero_gradient(record: Record) -> Iterator[Finding]:
    """Find a loss, or one of its terms, whose gradient is zero for all parameters."""
    norms, facts = record.gradient_norms, record.found_by("zero-gradient")
    # If no parameter is reached, it is another finding.
    whole = len(norms) >= FEWEST and not any(norms) and bool(record.wiring.zero_gradient)
    if whole or (facts and any(norms)):
        yield Finding("zero-gradient", "act",
            f"The gradient of the loss is exactly 0 for all parameters in all {len(norms)} steps."
            * whole + " " * (whole and bool(facts))
            + (f"{facts[0].place} compares a tensor with itself: it teaches nothing." if facts
               else ""),
            (Evidence("largest norm of a gradient", 0.0, 0.0) if whole else
             Evidence("losses that compare a tensor with itself", len(facts), 0.0),),
            (Advice("compare the outputs with the targets of the batch") if facts else
             Advice("look in the loss for rounding, clamps, margins that are satisfied"),),
            since=0)  # fmt: skip


def _of_weights(record: Record) -> Strength:
    """Return "act" if the run suffers, or can't even overfit one small batch."""
    stays = any(finding.strength == "act" for finding in cannot_overfit(record))
    return act_if(suffers(record) or stays)


@fault("class-weights", "Class weights that grow with the counts", explains=LEARNING)
def class_weights(record: Record) -> Iterator[Finding]:
    """Find weights of classes that grow with their counts, so that rare classes count even less."""
    for fact in record.found_by("class-weights"):
        numbers, words = fact.numbers, fact.words
        if numbers["slope"] > GROWS and numbers["correlation"] > CORRELATED:
            yield Finding("class-weights", _of_weights(record),
                f"{fact.place} weights class {words['common']} {numbers['times']:.3g} times as "
                f"much as class {words['rare']}, which is {numbers['more']:.3g} times as rare.",
                (Evidence("slope of log weight over log count", numbers["slope"], GROWS),),
                (Advice("weight each class by the inverse of its count"),))  # fmt: skip


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
            (Advice("check which labels the loss expects, and masks leave out"),))  # fmt: skip


@fault("padding-counts", "Padding counts in the loss")
def padding_counts(record: Record) -> Iterator[Finding]:
    """Find padding that counts in the loss as the other places do."""
    for fact in record.found_by("padding-counts"):
        if (share := fact.numbers["share"]) > PADDING:
            yield Finding("padding-counts", "watch",
                f"{share:.0%} of the places that count in the loss are padding, whose targets are "
                "all the same: the loss is lower than that of the real places.",
                (Evidence("share of padding in the places that count", share, PADDING, step=0),),
                (Advice("leave padding out of the loss, as by ignore_index"),),
                since=0)  # fmt: skip


@fault("penalty-dominates", "A penalty dominates the loss", explains=LEARNING)
def penalty_dominates(record: Record) -> Iterator[Finding]:
    """Find a penalty that keeps the terms beside it from learning anything of the inputs."""
    for fact in record.found_by("penalty-dominates"):
        numbers = fact.numbers
        run, copy = numbers["with"], numbers["without"]
        if copy > LEARNABLE * abs(numbers["others"]) and run < LEARNT * copy:
            yield Finding("penalty-dominates", _of_weights(record),
                f"A penalty, {numbers['penalty']:.3g} at first, keeps other terms from learning "
                "which input belongs to which target: with inputs exchanged between samples, they "
                f"rise by {run:.2g}, but by {copy:.2g} if trained without the penalty.",
                (Evidence("rise of the other terms with exchanged inputs", run, LEARNT * copy),),
                (Advice("give the penalty a far smaller weight, or one that rises"),))  # fmt: skip


@fault("unbounded-loss", "A loss without a lower bound", of="monitor",
       explains=(*LEARNING, *LONG_STEPS))  # fmt: skip
def negated(record: Record) -> Iterator[Finding]:
    """Find steps that go up the loss, which then has no bound."""
    seen = [report.loss_gradients for report in record.reports if report.loss_gradients]
    if seen and all(max(gradients) < 0 for gradients in seen):
        yield Finding("unbounded-loss",
            "act" if course(record) == "rises" and is_measure(record) else "note",
            "The steps raise the loss, since backward() begins at its negative.",
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
    facts = record.found_by("unbounded-loss")
    far = min(filter(math.isfinite, record.losses))
    limit = -FAR_BELOW * max(1.0, abs(record.losses[0]))
    where = "the end, ever faster"
    if facts and not falls_ever_faster(record):
        limit, far = 0.0, facts[0].numbers["loss"]
        where = f"weights that move {facts[0].numbers['times']:.0f} times as far"
    elif not falls_ever_faster(record):
        rate = min(record.rates, key=lambda factor: record.rates[factor].loss)
        far, where = record.rates[rate].loss, f"{rate:g} times the learning rate"
    negative = int(facts[0].numbers.get("negative", 0)) if facts else 0
    have = "sample of the first batch has" if negative == 1 else "samples of the first batch have"
    yield Finding("unbounded-loss", act_if(not negative),
        f"The loss has no lower bound: {record.losses[0]:.3g} at first, {far:.3g} at {where}."
        + f" {negative} {have} a negative weight." * bool(negative),
        (Evidence("loss", far, limit),),
        (Advice("if the weights are rewards or advantages, judge the training by the mean reward, "
                "and bound the change of the policy (PPO); else look where the signs come from"
                if negative else
                "look for a term with the wrong sign (an error or a penalty that is subtracted "
                "instead of added), and for a learnt variance or temperature without a lower "
                "limit"),))  # fmt: skip


@fault("loss-reversed", "The loss rewards wrong outputs", certain=True,
       explains=(*LEARNING, "vanishing"))  # fmt: skip
def loss_reversed(record: Record) -> Iterator[Finding]:
    """Find a loss that is lower, the more the outputs contradict the targets."""
    for fact in record.found_by("loss-reversed"):
        right, wrong = fact.numbers["right"], fact.numbers["wrong"]
        is_signed = fact.words["outputs"] == "signed"
        yield Finding("loss-reversed", act_if(is_signed),
            f"The loss is {wrong:.3g} if the outputs contradict all targets, and {right:.3g} if "
            "they agree with all."
            + " That may be meant, if they are distances or energies." * (not is_signed),
            (Evidence("loss of outputs that contradict all targets", wrong, right),),
            (Advice("look for a wrong sign, and for labels the wrong way round"),))  # fmt: skip


@fault("term-without-graph", "A term of the loss without a gradient",
       explains=(*LEARNING, "unbounded-loss"))  # fmt: skip
def term_without_graph(record: Record) -> Iterator[Finding]:
    """Find terms of the loss that depend on parameters and have no gradient."""
    for fact in record.found_by("term-without-graph"):
        value, loss = fact.numbers["value"], fact.numbers["loss"]
        yield Finding("term-without-graph", act_if(suffers(record) or is_unbounded(record)),
            f"{fact.place} adds {value:.3g} to the loss, {loss:.3g} in all. This term depends on "
            "the parameters, but has no gradient.",
            (Evidence("value of the term that has no gradient", value, step=0),),
            (Advice("compute the term with a graph (no detach(), item() or no_grad(), and "
                    "create_graph=True in torch.autograd.grad()), or leave it out"),))  # fmt: skip


@fault("terms-opposed", "Terms of the loss that cancel each other", explains=LEARNING)
def terms_opposed(record: Record) -> Iterator[Finding]:
    """Find two terms of the loss whose gradients cancel each other."""
    for fact in record.found_by("terms-opposed"):
        numbers = fact.numbers
        if numbers["largest"] < AGAINST and numbers["ratio"] > ALIKE:
            yield Finding("terms-opposed", "act",
                f"Two terms of the loss are opposed, from {fact.place} and {fact.words['other']}: "
                f"the cosine of their gradients is {numbers['cosine']:.3g}.",
                (Evidence("largest cosine of the two", numbers["largest"], AGAINST),),
                (Advice("give each player its own loss (detach generated samples), or look for a "
                        "term that is added with both signs"),))  # fmt: skip
