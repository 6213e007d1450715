"""Rules about batches, initial weights, and logits of limited range."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import HIGHER_RATES, RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.rates import suffers

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0


def constant_data(record: Record) -> Iterator[Finding]:
    """Find data without any difference to learn from: in inputs, labels, or the targets left."""
    for fact in record.found_by("constant-data"):
        of, numbers = fact.words["of"], fact.numbers
        check: tuple[Advice, ...]
        if of == "inputs":
            said = (
                f"All inputs of {numbers['samples']:.0f} samples are equal: no model can tell the "
                "samples apart."
            )
            check = (
                Advice(
                    "print two samples as the model receives them, and look for the step "
                    "of the preparation after which they are equal"
                ),
            )
        elif of == "labels":
            said = (
                f"All labels of {numbers['samples']:.0f} samples are {numbers['value']:g}: a "
                "constant prediction is right, and nothing else is learned."
            )
            check = (
                Advice(
                    "print the labels where they are read, and look for the step of the "
                    "preparation after which they are equal"
                ),
            )
        elif of == "ignored":
            said = (
                f"In {numbers['share']:.0%} of the batches, the loss ignores all targets: they "
                f"equal ignore_index ({numbers['index']:.0f}). Its mean over none is NaN."
            )
            check = (
                Advice("check the mask that chooses the targets to ignore: it may be inverted"),
            )
        else:
            said = (
                f"The loss ignores {numbers['share']:.0%} of the targets (ignore_index is "
                f"{numbers['index']:.0f}), and all others are {numbers['value']:g}: a constant "
                "prediction is right, and nothing else is learned."
            )
            check = (
                Advice(
                    "choose an ignore_index that is no class of the data, such as the "
                    "default of -100"
                ),
            )
        yield Finding(
            "constant-data",
            (),
            "act",
            (Evidence("different values", 1.0, 1.0, step=0),),
            check,
            said,
            "Another learning rate or model does not help: there is nothing to learn.",
            0,
            RATES,
        )  # fmt: skip


def same_batch(record: Record) -> Iterator[Finding]:
    """Find batches that repeat the same one or two."""
    for fact in record.found_by("same-batch"):
        different, given = fact.numbers["different"], fact.numbers["batches"]
        yield Finding(
            "same-batch",
            (),
            "act",
            (Evidence("different batches", different, 2.0),),
            (Advice("check which samples the loader returns: it returns the same ones each time; "
                    "set shuffle=True"),),
            f"The number of different batches is {different:.0f}, out of {given:.0f}: "
            "the model never sees the rest of the data. What it would learn from the rest is not "
            "known.",
            "More steps repeat the same samples.",
        )  # fmt: skip


def unshuffled(record: Record) -> Iterator[Finding]:
    """Find batches whose labels are more alike than those of shuffled batches."""
    for fact in record.found_by("unshuffled"):
        ratio, z = fact.numbers["ratio"], fact.numbers["z"]
        if ratio < UNSHUFFLED and z < -DEVIATIONS:
            yield Finding(
                "unshuffled",
                (),
                "act" if ratio < SORTED else "watch",
                (
                    Evidence("variance of labels within a batch, over that in shuffled batches",
                             ratio, UNSHUFFLED),
                    Evidence("distance from shuffled batches, in standard deviations", z,
                             -DEVIATIONS),
                ),
                (Advice("shuffle the samples before they are split into batches (shuffle=True), "
                        "unless the model should learn their order"),),
                f"The labels within a batch vary {ratio:.3g} times as much as in shuffled batches: "
                "the data are sorted. Each step learns the labels of its batch and forgets the "
                "others.",
                "Larger batches of sorted data are sorted too.",
                against=("larger-batch",),
            )  # fmt: skip


def one_sided_weights(record: Record) -> Iterator[Finding]:
    """Find initial weights that are nearly all of one sign."""
    facts = record.found_by("one-sided-weights")
    if facts:
        worst = max(facts, key=lambda fact: fact.numbers["share"])
        names = ", ".join(f"'{fact.place}'" for fact in facts[:3])
        more = f" and {len(facts) - 3} more" if len(facts) > 3 else ""
        yield Finding(
            "one-sided-weights",
            tuple(fact.place for fact in facts),
            "act" if suffers(record) else "watch",
            (Evidence("abs(mean) / rms", worst.numbers["share"], 0.3, worst.place, 0),),
            (Advice("draw the weights around zero: torch.randn times 1/√(fan-in), or nn.init, "
                    "instead of torch.rand", "centred-weights"),),
            f"Nearly all initial values of {names}{more} have the same sign (abs(mean) / rms is "
            f"{worst.numbers['share']:.3g}): all units of such a layer return nearly the same "
            "value.",
            since=0,
        )  # fmt: skip


def bounded_logits(record: Record) -> Iterator[Finding]:
    """Find logits within ±1 by their construction, not by an activation function on them."""
    if record.activated_output is not None or record.double_softmax:
        return
    for fact in record.found_by("bounded-logits"):
        floor, classes = fact.numbers["floor"], fact.numbers["classes"]
        yield Finding(
            "bounded-logits",
            (),
            "act" if suffers(record) else "watch",
            (Evidence("share of the logits within ±1", fact.numbers["share"], 0.9),),
            (Advice("multiply the logits by a factor of 10 to 30, or by a learnt one",
                    "logits-times-10"),),
            f"The logits of {fact.place} stay between −1 and 1 even if all weights are ten times "
            f"as large. With {classes:.0f} classes, its loss can't fall below {floor:.3g}.",
            "A higher learning rate does not widen the range of the logits.",
            against=HIGHER_RATES,
        )  # fmt: skip
