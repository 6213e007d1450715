"""Rules about batches, initial weights, and logits of limited range."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.rates import suffers

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0


def same_batch(record: Record) -> Iterator[Finding]:
    """Find batches that repeat the same one or two."""
    for fact in record.found_by("same-batch"):
        different, given = fact.numbers["different"], fact.numbers["batches"]
        yield Finding(
            "same-batch",
            (),
            "act",
            (Evidence("different batches", different, 2.0),),
            (Advice("look at the loader's index: it gives the same samples each time; set "
                    "shuffle=True"),),
            f"Of {given:.0f} batches only {different:.0f} differ: the rest of the data is never "
            "seen. Nothing is said here of what would be learnt from it.",
            "More steps: they see the same samples.",
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
                    Evidence("labels' variance within batches, of shuffled ones'", ratio,
                             UNSHUFFLED),
                    Evidence("standard deviations of shuffles from their mean", z, -DEVIATIONS),
                ),
                (Advice("shuffle the samples before they are made into batches (shuffle=True), "
                        "unless what follows one another shall be learnt"),),
                f"The labels of a batch vary by {ratio:.2g} of what those of shuffled batches do: "
                "the data are sorted. Each step learns its own labels and forgets the others.",
                "A larger batch of sorted data is sorted as well.",
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
            (Advice("draw them around zero: torch.randn times 1/√(fan-in), or nn.init, in place "
                    "of torch.rand", "centred-weights"),),
            f"The first values of {names}{more} lie on one side of zero (mean over rms "
            f"{worst.numbers['share']:.2f}): all units give nearly the same, their mean.",
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
            (Advice("multiply them by a temperature of 10 to 30, or one that is learnt",
                    "logits-times-10"),),
            f"{fact.place} is given logits between −1 and 1, also where all weights are ten times "
            f"as large: of {classes:.0f} classes its loss can't be less than {floor:.3g}.",
            "A higher learning rate makes no cosine larger than 1.",
            against=HIGHER_RATES,
        )  # fmt: skip
