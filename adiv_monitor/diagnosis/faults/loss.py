"""Does the loss teach what it should?

Has it a slope at all; how does it weigh labels, classes, padding and penalties; has it a lower
bound; and is it lower for right outputs than for wrong ones?
"""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis import course
from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults import could_train
from adiv_monitor.diagnosis.faults.fault import (
    LEARNING,
    LONG_STEPS,
    NOT_LEARNT,
    Number,
    fault,
    finds,
    told,
)
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.states import cannot_overfit
from adiv_monitor.diagnosis.finding import FAR_BELOW, Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.record import Record

# Slope of the logarithm of classes' weights over that of their counts: −1 balances them, 1 is that
# of counts in place of their inverses. Weights for other reasons correlate less with the counts.
GROWS, CORRELATED, BALANCES = 0.5, 0.9, 0.1
# Share of padding in the places that count in the loss.
PADDING, ALONE = 0.05, 0.9
# By how much the loss, without the penalty, rises with exchanged inputs: in the run, over a copy
# trained without the penalty, and in that copy, over its loss. Healthy VAEs have 0.9 for the first.
LEARNT, LEARNABLE = 0.1, 0.02
# Cosine of the gradients of two terms, in each parameter tensor that both reach, and the ratio of
# the shorter to the longer gradient. Real and generated samples of a critic have −0.83 in all, and
# −0.26 in one tensor.
AGAINST, ALIKE = -0.95, 0.5
# Of the loss, what its own weights leave; uncertainties with their logarithm leave 0.5.
ITSELF = 0.1
# Share of the loss that the best outputs leave; labels that are smoothed by 0.1 have 0.3.
IN_VAIN = 0.8


told(__name__, "zero-slope", "A function that stops the gradient",
     lambda record: record.wiring.zero_gradient,
     "The slope of {place} is zero everywhere: no gradient passes it.",
     Advice("use a smooth function, or pass gradients: x + (f(x) - x).detach()"),
     explains=(*LEARNING, "stands-still", "target-scale", "vanishing"))  # fmt: skip


@fault("zero-gradient", "Gradients of zero", certain=True, about="loop",
       explains=("weights-set-back", "projection-fights"),
       shown_by=lambda record: course.is_known(record) and read.several(record))  # fmt: skip
def zero_gradient(record: Record) -> Iterator[Finding]:
    """Find gradients that are zero, or no more than rounding, in all steps."""
    if not read.several(record) or not course.is_known(record) or course.course(record) == "falls":
        return
    norms = [max(read.gradients(record, r).values(), default=math.nan) for r in record.reports]
    least = could_train.ROUNDING * min(1.0, abs(record.losses[0]))
    small = all(norm <= least for norm in norms)
    if small and record.reports[-1].coverage > 0.5 and not any(could_train.scaled(record)):
        yield Finding("zero-gradient", act_if(course.is_measure(record)),
            "In every measured step, the gradient of the loss is zero, or no more than rounding.",
            (Evidence("largest gradient at a layer", max(norms), least),),
            (Advice("check that the targets are no copy of the outputs, and look in the loss for "
                    "rounding, clamps, and margins that are satisfied"),))  # fmt: skip


told(__name__, "zero-gradient", "", "act",
     "{place} compares a tensor with itself: the gradients cancel, and it teaches nothing.",
     Advice("compare the outputs with targets of the batch, or stored values"))  # fmt: skip


def lasts(record: Record) -> bool:
    """Return whether the run suffers, or can't even overfit one small batch."""
    stays = any(finding.strength == "act" for finding in cannot_overfit(record))
    return suffers(record) or stays


told(__name__, "class-weights", "Class weights that do not balance the classes", lasts,
     "{place} weights class {common} {times:.3g} times as much as class {rare}, which is "
     "{more:.3g} times as rare.",
     Number("slope of log weight over log count", "slope", above=GROWS),
     Number("correlation of the two", "correlation", above=CORRELATED),
     Advice("weight each class by the inverse of its count"), explains=LEARNING)  # fmt: skip
told(__name__, "class-weights", "", "watch",
     "The weights that {place} gives the classes would balance them, but belong to other classes.",
     Number("what both leave of each other, if they are sorted", "off", below=BALANCES),
     Number("correlation of log weight and log count", "correlation", above=-0.5),
     Advice("compute the weights in the order of the classes: value_counts() sorts by frequency"),
     where=lambda fact: fact.numbers["correlation"] < CORRELATED)  # fmt: skip


told(__name__, "class-untaught", "Classes that no sample teaches", lasts,
     "No sample with label {label:g} has a gradient at the outputs, neither before nor after "
     "training: {samples:.0f} of {length:.0f} samples teach nothing.",
     Number("samples of the class", "samples"),
     Advice("check which labels the loss expects, and masks leave out"),
     where=lambda fact: "label" in fact.numbers, explains=(*LEARNING, "collapsed"))  # fmt: skip
told(__name__, "class-untaught", "", suffers,
     "Of the {length:.0f} {of} of the outputs, {unread:.0f} never have a gradient, before or "
     "after training: the loss teaches them nothing (number {first:.0f} is the first).",
     Number("parts without a gradient", "unread"),
     Advice("check the axis along which the loss gathers, slices or counts the outputs, and the "
            "lengths that it is given"),
     where=lambda fact: "unread" in fact.numbers,
     unless=lambda record: record.found_by("zero-gradient"))  # fmt: skip
told(__name__, "class-untaught", "", "note",
     "Of the {classes:.0f} classes of the outputs, {missing:.0f} have no sample among {labels:.0f} "
     "labels (number {first:.0f} is the first).",
     Number("classes that never occur", "missing"),
     Advice("shuffle the samples before they are split into training and validation, and check "
            "whether labels begin at 0; fewer outputs do, if there are no such samples"),
     where=lambda fact: "missing" in fact.numbers)  # fmt: skip


told(__name__, "padding-counts", "Padding counts in the loss",
     lambda record: record.found_by("padding-counts")[0].numbers["share"] > ALONE,
     "{share:.0%} of the places that count in the loss are padding, whose targets are all the "
     "same: the loss is lower than that of the real places.",
     Number("share of padding in the places that count", "share", above=PADDING),
     Advice("leave padding out of the loss, as by ignore_index, and check that its mask is not the "
            "wrong way round"))  # fmt: skip


told(__name__, "penalty-dominates", "A penalty dominates the loss", lasts,
     "A penalty, {penalty:.3g} at first, keeps other terms from learning which input belongs to "
     "which target: with inputs exchanged between samples, they rise by {with:.2g}, but by "
     "{without:.2g} if trained without the penalty.",
     Number("rise of the other terms with exchanged inputs", "with"),
     Advice("give the penalty a far smaller weight, or one that rises"),
     where=lambda fact: "with" in fact.numbers
     and fact.numbers["with"] < LEARNT * fact.numbers["without"]
     and fact.numbers["without"] > LEARNABLE * abs(fact.numbers["others"]),
     explains=LEARNING)  # fmt: skip


@finds("monitor")
def outweighed(record: Record) -> Iterator[Finding]:
    """Find gradients that hold more of something else than of the loss of the batch's rows."""
    least = min(could_train.foreign_shares(record), default=0.0)
    badly = read.several(record) and could_train.goes_badly(record) and course.is_measure(record)
    once = all(len(report.loss_gradients) < 2 for report in record.reports)
    if least > could_train.FOREIGN and badly and once:
        yield Finding("penalty-dominates", "act",
            f"Typically {least:.0%} and more of the gradient of each layer is not that of the "
            "loss at its outputs, which does not fall: a penalty, or code that changes gradients, "
            "outweighs it.",
            (Evidence("foreign_share", least, could_train.FOREIGN),),
            (Advice("give the penalty a far smaller weight, or use weight decay"),))  # fmt: skip


told(__name__, "penalty-dominates", "", "watch",
     "The loss falls by {falls:.3g} in training, but not by its error: the terms that compare "
     "outputs with targets rise from {before:.3g} to {after:.3g} (first batch). Other terms reward "
     "something for its own sake, such as a spread, a norm or an entropy.",
     Number("terms that compare, after training", "after"),
     Advice("check the sign and the weight of each term that is no error"),
     where=lambda fact: "after" in fact.numbers,
     unless=lambda record: not any(fact.numbers["after"] > (record.chance or math.inf)
                                   for fact in record.found_by("penalty-dominates")))  # fmt: skip


@fault("unbounded-loss", "A loss without a lower bound", explains=(*NOT_LEARNT, *LONG_STEPS))
def unbounded(record: Record) -> Iterator[Finding]:
    """Find a loss without a lower bound: it falls ever faster, or keeps falling on a straight line.

    The line is that from the first weights through the last ones.
    """
    if not any(map(math.isfinite, record.losses)) or not course.is_unbounded(record):
        return
    numbers = next((fact.numbers for fact in record.found_by("unbounded-loss")), {})
    negative = int(numbers.get("negative", 0))
    first, far = record.losses[0], min(filter(math.isfinite, record.losses))
    limit, where = -FAR_BELOW * max(1.0, abs(first)), "the end, ever faster"
    if numbers and not course.falls_ever_faster(record):
        limit, far = 0.0, numbers["loss"]
        where = f"weights that move {numbers['times']:.0f} times as far"
    elif not course.falls_ever_faster(record):
        rate, trial = min(record.rates.items(), key=lambda tried: tried[1].loss)
        far, where = trial.loss, f"{rate:g} times the learning rate"
    yield Finding("unbounded-loss", act_if(not negative),
        f"The loss has no lower bound: {first:.3g} at first, {far:.3g} at {where}."
        + f" Samples of the first batch with a negative weight: {negative}." * bool(negative),
        (Evidence("loss", far, limit),),
        (*[Advice("if the weights are rewards or advantages, judge the training by the mean "
                  "reward, and bound the change of the policy (PPO)")] * bool(negative),
         Advice("look for a term with the wrong sign (an error or a penalty that is subtracted "
                "instead of added), and for a learnt variance or temperature without a lower "
                "limit")))  # fmt: skip


told(__name__, "loss-reversed", "The loss rewards wrong outputs",
     lambda record: record.found_by("loss-reversed")[0].words["outputs"] == "signed",
     "The loss is {wrong:.3g} if the outputs contradict all targets, and {right:.3g} if they agree "
     "with all.",
     Number("loss of outputs that contradict all targets", "wrong"),
     Advice("look for a wrong sign, and for labels the wrong way round, unless the outputs are "
            "distances or energies"),
     certain=True, explains=(*LEARNING, "vanishing"))  # fmt: skip

told(__name__, "term-without-graph", "A term of the loss without a gradient",
     lambda record: suffers(record) or course.is_unbounded(record),
     "{place} adds {value:.3g} to the loss, {loss:.3g} in all. This term depends on the "
     "parameters, but has no gradient.",
     Number("value of the term that has no gradient", "value"),
     Advice("compute the term with a graph (no detach(), item() or no_grad(), and "
            "create_graph=True in torch.autograd.grad()), or leave it out"),
     explains=(*LEARNING, "unbounded-loss"))  # fmt: skip


told(__name__, "target-attached", "A target that passes gradients on", suffers,
     "The network runs twice in the loss, and one time its outputs get minus {share:.3g} times the "
     "gradients of the other: a target, such as r + {share:.3g} Q, passes gradients on.",
     Number("gradient of the target, over minus that of the value", "share"),
     Advice("compute the target under torch.no_grad(), or detach() it"),
     explains=LEARNING)  # fmt: skip


told(__name__, "terms-opposed", "Terms of the loss that cancel each other", "act",
     "Two terms of the loss are opposed, from {place} and {other}: the cosine of their gradients "
     "is {cosine:.3g}.",
     Number("largest cosine of the two", "largest", below=AGAINST),
     Number("length of the shorter gradient over the longer", "ratio", above=ALIKE),
     Advice("give each player its own loss (detach generated samples), or look for a term that is "
            "added with both signs"), explains=LEARNING)  # fmt: skip


told(__name__, "weighs-itself", "A loss that lowers itself", suffers,
     "For the same outputs, the loss falls from {first:.3g} to {lowest:.3g} by {place} alone: "
     "weights of its terms, or the like, with nothing that holds them.",
     Number("what is left of the loss", "share", below=ITSELF),
     Advice("add what holds the weights, such as log σ to loss / σ², or fix them"),
     explains=(*LEARNING, "unbounded-loss"))  # fmt: skip


told(__name__, "outputs-in-vain", "A loss that no outputs lower", suffers,
     "Whatever the last layers return, the loss of a few samples does not fall below {lowest:.3g} "
     "({first:.3g} at first, {zeros:.3g} if all outputs are 0): the fault is in the loss, its "
     "targets, or what lies between the last layer and the loss.",
     Number("lowest loss, over that of the model or of zeros", "share", above=IN_VAIN),
     Advice("compute the loss of perfect outputs by hand: look for bounds on the outputs, scales "
            "and temperatures, constants that drown the rest, smoothed or repeated targets"),
     unless=lambda record: record.found_by("bounded-logits"), explains=NOT_LEARNT)  # fmt: skip
