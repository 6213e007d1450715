"""Rules about how outputs meet their targets, from the facts that probes found on copies."""

from collections.abc import Iterator

from adiv_monitor.diagnosis.finding import RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.rates import suffers

# Share of the targets outside the range of the function on the outputs.
OUTSIDE = 0.01


def broadcast_loss(record: Record) -> Iterator[Finding]:
    """Find a loss that compares each output with the targets of all samples."""
    for fact in record.found_by("broadcast-loss"):
        a, b = fact.words["of"], fact.words["and"]
        yield Finding(
            "broadcast-loss",
            (),
            "act",
            (Evidence("entries of the difference, of those of the larger", fact.numbers["times"],
                      1.0, step=0),),
            (Advice("squeeze the output, or unsqueeze the target, so that both have one shape",
                    "matched-shapes"),),
            f"{fact.place} takes {a} and {b} for one another: broadcast, each output is compared "
            "with the targets of all samples, and the best that it can give is their mean.",
            "Another learning rate leads to the same mean.",
            0,
            RATES,
        )  # fmt: skip


def no_log(record: Record) -> Iterator[Finding]:
    """Find a loss that expects log-probabilities but gets probabilities or logits."""
    for fact in record.found_by("no-log"):
        if fact.words.get("given") == "logits":
            yield Finding(
                "no-log",
                (),
                "act",
                (Evidence("the loss takes logits for log-probabilities", 1.0, step=0),),
                (Advice("cross_entropy in place of nll_loss, or log_softmax in front of it"),),
                f"{fact.place} is given logits, whose exponentials do not sum to 1, and takes them "
                "for log-probabilities. The loss has no lower bound: it falls as the outputs grow, "
                "whatever the model learns.",
                "A higher learning rate lets the outputs grow faster.",
                0,
                RATES,
            )
            continue
        yield Finding(
            "no-log",
            (),
            "act",
            (Evidence("the loss takes probabilities for their logarithms", 1.0, step=0),),
            (Advice("take the logarithm first: log_softmax in place of softmax, or cross_entropy "
                    "of what goes into the softmax"),),
            f"{fact.place} is given probabilities, which sum to 1, and takes them for their "
            "logarithms. Its gradient is weakest where the model is wrong.",
            since=0,
        )  # fmt: skip


def softmax_of_one(record: Record) -> Iterator[Finding]:
    """Find a softmax over one class, which is always 1."""
    for fact in record.found_by("softmax-of-one"):
        own = fact.words["function"] == "cross_entropy"
        yield Finding(
            "softmax-of-one",
            (),
            "act",
            (Evidence("classes of a softmax", 1.0, 1.0, step=0),),
            (
                Advice("give the model an output for each class, or take "
                       "binary_cross_entropy_with_logits")
                if own
                else Advice("take the softmax off, or put a sigmoid in its place", "no-softmax"),
            ),
            f"{fact.place} of {fact.words['shape']} is over one class: it gives 1, or a loss of 0, "
            "whatever the model does, and no gradient.",
            "No learning rate makes a gradient of none.",
            0,
            RATES,
        )  # fmt: skip


def softmax_over_samples(record: Record) -> Iterator[Finding]:
    """Find a softmax over the first axis, that of the samples."""
    for fact in record.found_by("softmax-over-samples"):
        yield Finding(
            "softmax-over-samples",
            (),
            "act",
            (Evidence("axis of the softmax", 0.0, step=0),),
            (Advice("take it over the classes: dim=1", "softmax-over-classes"),),
            f"{fact.place} of {fact.words['shape']} is over the samples, not the classes: what one "
            "sample gets depends on the others of its batch.",
            since=0,
        )


def targets_out_of_range(record: Record) -> Iterator[Finding]:
    """Find regression targets outside the range of the function on the outputs."""
    for fact in record.found_by("targets-out-of-range"):
        share = fact.numbers["share"]
        if share > OUTSIDE:
            yield Finding(
                "targets-out-of-range",
                (),
                "act" if suffers(record) else "watch",
                (Evidence("share of the targets out of range", share, OUTSIDE),),
                (Advice("take that function off the outputs, or scale the targets into its range",
                        "unbounded-outputs"),),
                f"{share:.0%} of the targets lie outside of {fact.words['low']} to "
                f"{fact.words['high']}, which is all that {fact.place} on the outputs can give.",
                "Another learning rate does not widen the range.",
                0,
                RATES,
            )  # fmt: skip


def target_is_input(record: Record) -> Iterator[Finding]:
    """Find a language model whose labels are not shifted by one."""
    for fact in record.found_by("target-is-input"):
        yield Finding(
            "target-is-input",
            (),
            "act",
            (Evidence("share of the targets that are the inputs", fact.numbers["share"], 0.99),),
            (Advice("move the labels on by one: outputs up to the last but one against tokens from "
                    "the second on"),),
            "The targets are the tokens that the model is given at the same places, and it does "
            "not look ahead: it learns to copy its input, not to predict what comes next.",
            since=0,
        )  # fmt: skip


def future_leak(record: Record) -> Iterator[Finding]:
    """Find a model of the next token whose inputs include that token."""
    for fact in record.found_by("future-leak"):
        yield Finding(
            "future-leak",
            (),
            "act",
            (Evidence("change of outputs with later inputs", fact.numbers["change"], 1e-5),),
            (Advice("give attention a causal mask (is_causal=True), and recurrent layers one "
                    "direction only"),),
            "The targets are the inputs moved on by one, and outputs change with the inputs behind "
            "them: the model is given what it shall predict. Its loss says nothing of how well it "
            "predicts.",
            since=0,
        )  # fmt: skip
