"""Rules about what counts in the loss, and how much: classes, padding, terms beside each other."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import RATES, Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.loss import cannot_overfit
from adiv_monitor.diagnosis.rules.rates import suffers

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


def _strength(record: Record) -> Strength:
    """Return "act" if the run suffers, or can't even overfit one small batch."""
    stays = any(finding.strength == "act" for finding in cannot_overfit(record))
    return "act" if suffers(record) or stays else "watch"


def label_smoothing(record: Record) -> Iterator[Finding]:
    """Find label smoothing that leaves the right class less weight than all others together."""
    for fact in record.found_by("label-smoothing"):
        share, classes = fact.numbers["share"], fact.numbers["classes"]
        if share > SMOOTH:
            yield Finding(
                "label-smoothing",
                (),
                _strength(record),
                (Evidence("label smoothing", share, SMOOTH, step=0),),
                (Advice("use label_smoothing=0.1 or less"),),
                f"{fact.place} uses a label smoothing of {share:.3g}: of {classes:.0f} classes, "
                f"the right one gets {1 - share + share / classes:.0%} of the target's weight.",
                "Another learning rate does not make the targets clearer.",
                0,
                RATES,
            )  # fmt: skip


def class_weights(record: Record) -> Iterator[Finding]:
    """Find weights of classes that grow with their counts, so that rare classes count even less."""
    for fact in record.found_by("class-weights"):
        numbers, words = fact.numbers, fact.words
        if numbers["slope"] > GROWS and numbers["correlation"] > CORRELATED:
            yield Finding(
                "class-weights",
                (),
                _strength(record),
                (Evidence("slope of log weight over log count, of classes", numbers["slope"],
                          GROWS, step=0),),
                (Advice("weight each class by the inverse of its count: counts.sum() / counts; "
                        "for pos_weight, the number of negative targets over that of positive "
                        "ones"),),
                f"{fact.place} weights class {words['common']} {numbers['times']:.3g} times as "
                f"much as class {words['rare']}, of which there are fewer samples already, "
                f"by {numbers['more']:.3g} times: the weights grow with the counts.",
                since=0,
            )  # fmt: skip


def class_untaught(record: Record) -> Iterator[Finding]:
    """Find classes of which no sample has a gradient."""
    facts = record.found_by("class-untaught")
    if facts:
        named = ", ".join(f"{fact.numbers['class']:g}" for fact in facts)
        samples = sum(fact.numbers["samples"] for fact in facts)
        yield Finding(
            "class-untaught",
            (),
            _strength(record),
            (Evidence("samples with a gradient, of these classes", 0.0, step=0),),
            (Advice("check what the loss expects as labels, such as −1 and 1 instead of 0 and 1, "
                    "and whether a weight, a mask or an ignore_index leaves these samples out"),),
            f"No sample with label {named} has a gradient at the outputs, neither before nor after "
            f"training: {samples:.0f} of {facts[0].numbers['of']:.0f} samples teach nothing.",
            "More samples of these labels would teach nothing either.",
            0,
        )  # fmt: skip


def padding_counts(record: Record) -> Iterator[Finding]:
    """Find padding that counts in the loss as the other places do."""
    for fact in record.found_by("padding-counts"):
        share = fact.numbers["share"]
        if share > PADDING:
            yield Finding(
                "padding-counts",
                (),
                "watch",
                (Evidence("share of padding in the places that count", share, PADDING, step=0),),
                (Advice("leave padding out of the loss: ignore_index, or the sum over real places "
                        "divided by their number"),),
                f"{share:.0%} of the places that count in the loss are padding, whose targets are "
                "all the same: the loss is lower than that of the real places.",
                "A lower loss does not show that the real places are predicted better.",
                since=0,
            )  # fmt: skip


def penalty_dominates(record: Record) -> Iterator[Finding]:
    """Find a penalty that keeps the terms beside it from learning anything of the inputs."""
    for fact in record.found_by("penalty-dominates"):
        numbers = fact.numbers
        run, copy = numbers["with"], numbers["without"]
        if copy > LEARNABLE * abs(numbers["others"]) and run < LEARNT * copy:
            yield Finding(
                "penalty-dominates",
                (),
                _strength(record),
                (Evidence("rise of the other terms with exchanged inputs", run, LEARNT * copy),),
                (Advice("give these terms far smaller weights, or raise them from zero over "
                        "the first steps; check whether they are sums where the others are "
                        "means"),),
                "The terms of the loss that do not depend on which input belongs to which target, "
                f"{numbers['penalty']:.3g} at first and {numbers['penalty after']:.3g} at the end, "
                "keep the others from learning it: if inputs are exchanged between samples, the "
                f"others rise by {run:.2g}, but by {copy:.2g} in a copy that was trained without "
                "these terms.",
                "Another learning rate does not change the weights of the terms.",
                against=RATES,
            )  # fmt: skip
