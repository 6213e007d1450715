"""Can anything be learnt from the data?

Do inputs and labels differ, do batches, and are they shuffled? Is the target among the features, or
moved against its image? Last: do the labels belong to the inputs at all?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.could_train import FEWEST_SAME
from adiv_monitor.diagnosis.faults.fault import LEARNING, fault, finds, reported
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, Strength
from adiv_monitor.diagnosis.record import Fact, Record

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0
# Share of the target's variance that one feature explains; what is left may be rounding.
DETERMINED = 0.9999
_ONE_VALUE = Evidence("different values", 1.0, 1.0, step=0)
MOVED = {
    "transposed": "transposed",
    "rows-reversed": "flipped vertically",
    "columns-reversed": "flipped horizontally",
    "upside-down": "turned by 180°",
    "left": "turned left",
    "right": "turned right",
}
# Correlation of pixels with moved targets; and that with the targets as they are, over it.
FITS, BETTER = 0.2, 0.5
# A small network explains more than this share of unseen labels, and the model less than this share
# of what that explains; labels that a model of theirs explains so little of, with so many samples
# of each class, may not belong to their inputs.
EXPLAINS, BEHIND, LEARNT, PER_CLASS = 0.3, 0.25, 0.15, 20


@fault("constant-data", "Data without differences", certain=True, explains=(
       *LEARNING, "exploding", "labels-unrelated", "non-finite", "same-batch"))  # fmt: skip
def constant_data(record: Record) -> Iterator[Finding]:
    """Find data without any difference to learn from: in inputs, labels, or the targets left."""
    for fact in record.found_by("constant-data"):
        of, numbers = fact.words["of"], fact.numbers
        if of in ("input", "features"):
            yield _constant_part(fact)
            continue
        if of == "inputs":
            said = (f"All inputs of {numbers['samples']:.0f} samples are equal: "
                    "no model can tell the samples apart.")  # fmt: skip
            check = ("print two samples as the model receives them, and look for the step of the "
                     "preparation after which they are equal")  # fmt: skip
        elif of == "labels":
            said = (f"All labels of {numbers['samples']:.0f} samples are {numbers['value']:g}: a "
                    "constant prediction is right, and nothing else is learned.")  # fmt: skip
            check = ("print the labels where they are read, and look for the step of the "
                     "preparation after which they are equal")  # fmt: skip
        elif of == "ignored":
            said = (f"In {numbers['share']:.0%} of the batches, the loss ignores all targets: they "
                    f"equal ignore_index ({numbers['index']:.0f}). "
                    "Its mean over none is NaN.")  # fmt: skip
            check = "check the mask that chooses the targets to ignore: it may be inverted"
        else:
            said = (f"The loss ignores {numbers['share']:.0%} of the targets (ignore_index is "
                    f"{numbers['index']:.0f}), and all others are {numbers['value']:g}: a constant "
                    "prediction is right, and nothing else is learned.")  # fmt: skip
            check = ("choose an ignore_index that is no class of the data, "
                     "such as the default of -100")  # fmt: skip
        yield Finding("constant-data", "act", said, (_ONE_VALUE,), (Advice(check),),
            "Another learning rate or model does not help: there is nothing to learn.",
            since=0)  # fmt: skip


def _constant_part(fact: Fact) -> Finding:
    """Return the finding of an input, or of features, that never vary beside others that do."""
    words, samples = fact.words, f"{fact.numbers['samples']:.0f} samples"
    return Finding("constant-data", "note" if words["type"] == "integer" else "watch",
        f"All entries of input '{words['input']}' are {fact.numbers['value']:g} in {samples}: it "
        "tells nothing." if words["of"] == "input" else
        f"The features of input '{words['input']}' with index {words['at']} are the same in "
        f"{samples}, while the others vary: they tell nothing.",
        (_ONE_VALUE,),
        (Advice("unless it is meant to be constant, look for the step of the preparation after "
                "which it is: a column that was never filled, or a division of whole numbers"),),
        since=0)  # fmt: skip


@fault(
    "same-batch",
    "The same batch is repeated",
    shown_by=lambda r: len(r.reports) >= FEWEST_SAME and reported("batch")(r),
    of="monitor",
    certain=True,
    explains=("cannot-overfit", "behind-reference"),
)
def one_batch(record: Record) -> Iterator[Finding]:
    """Find inputs that are equal in all measured steps, and in the step after each."""
    sums = {r.batch for r in record.reports} | {r.next_batch for r in record.reports[:-1]}
    if len(record.reports) < FEWEST_SAME or len(sums) > 1 or not sums.pop():
        return
    yield Finding("same-batch", "note",
        "Every measured step saw the same batch. That is meant, if these are all your data.",
        (Evidence("different batches in the measured steps", 1, 1),),
        (Advice("check that the data loader is asked for a new batch in each step"),))  # fmt: skip


@finds()
def same_batch(record: Record) -> Iterator[Finding]:
    """Find batches that repeat the same one or two, or samples that repeat within a batch."""
    for fact in record.found_by("same-batch"):
        if fact.words["of"] == "samples":
            share = fact.numbers["share"]
            yield Finding("same-batch", "watch",
                f"At most {share:.0%} of the samples of a batch differ from each other; the rest "
                "repeat them.",
                (Evidence("share of a batch's samples that differ", share, 0.5),),
                (Advice("check whether the dataset uses its index, and what the sampler returns, "
                        "unless samples are repeated on purpose"),),
                "Larger batches of the same samples teach no more.",
                against=())  # fmt: skip
        elif fact.words["of"] == "one":
            yield Finding("same-batch", "watch",
                f"All {fact.numbers['batches']:.0f} batches are the same one.",
                (Evidence("different batches", 1.0, 2.0),),
                (Advice("if this is no test of overfitting, take a new batch for each step: "
                        "next(iter(loader)) begins the loader again each time"),))  # fmt: skip
        else:
            different, given = fact.numbers["different"], fact.numbers["batches"]
            yield Finding("same-batch", "act",
                f"The number of different batches is {different:.0f}, out of {given:.0f}: the "
                "model never sees the rest of the data. What it would learn from the rest is not "
                "known.",
                (Evidence("different batches", different, 2.0),),
                (Advice("check which samples the loader returns: it returns the same ones each "
                        "time; set shuffle=True"),),
                "More steps repeat the same samples.", against=())  # fmt: skip


@fault("unshuffled", "The data are not shuffled", certain=True)
def unshuffled(record: Record) -> Iterator[Finding]:
    """Find batches whose labels are more alike than those of shuffled batches."""
    for fact in record.found_by("unshuffled"):
        ratio, z = fact.numbers["ratio"], fact.numbers["z"]
        if ratio < UNSHUFFLED and z < -DEVIATIONS:
            yield Finding("unshuffled", "act" if ratio < SORTED else "watch",
                f"The labels within a batch vary {ratio:.3g} times as much as in shuffled batches: "
                "the data are sorted. Each step learns the labels of its batch and forgets the "
                "others.",
                (Evidence("variance of labels within a batch, over that in shuffled batches", ratio,
                          UNSHUFFLED),
                 Evidence("distance from shuffled batches, in standard deviations", z,
                          -DEVIATIONS)),
                (Advice("shuffle the samples before they are split into batches (shuffle=True), "
                        "unless the model should learn their order"),),
                "Larger batches of sorted data are sorted too.",
                against=())  # fmt: skip


@fault("target-leak", "A feature that is the target")
def target_leak(record: Record) -> Iterator[Finding]:
    """Find a feature of the inputs that is the target."""
    for fact in record.found_by("target-leak"):
        share, feature = fact.numbers["share"], fact.numbers["feature"]
        if share > DETERMINED:
            yield Finding("target-leak", "watch",
                f"Feature {feature:.0f} of {fact.place} determines the target of all "
                f"{fact.numbers['samples']:.0f} samples: the model can copy it. A low loss does "
                "not show that it predicts well.",
                (Evidence("share of the target's variance that a feature explains", share,
                          DETERMINED),),
                (Advice("leave the target's column out of the inputs, "
                        "and what was made of it"),))  # fmt: skip


@fault("targets-moved", "Targets that are transposed or flipped", explains=LEARNING)
def targets_moved(record: Record) -> Iterator[Finding]:
    """Find targets for pixels that fit the images far better transposed, flipped or turned."""
    for fact in record.found_by("targets-moved"):
        own, best = fact.numbers["own"], fact.numbers["best"]
        if best > FITS and own < BETTER * best:
            yield Finding("targets-moved", "act" if suffers(record) else "watch",
                f"The targets of pixels fit the images better {MOVED[fact.words['move']]}: their "
                f"correlation is then {best:.2g} instead of {own:.2g}.",
                (Evidence("correlation of the pixels with their targets", own, BETTER * best),),
                (Advice("look at an image with its target over it, and compare the order of their "
                        "axes, and the transforms that each gets"),),
                "More steps only teach the model to move its outputs.", against=())  # fmt: skip


@fault("labels-unrelated", "Labels that no model predicts")
def labels_unrelated(record: Record) -> Iterator[Finding]:
    """Find labels that neither a small network nor the model predicts better than by chance."""
    for fact in record.found_by("behind-reference"):
        reference, own, error = (fact.numbers[name] for name in ("reference", "model", "error"))
        enough = fact.numbers["per class"] >= PER_CLASS
        if enough and reference <= error and own <= max(error, LEARNT):
            yield Finding("labels-unrelated", "watch",
                "Neither a small network nor this model predicts the labels of "
                f"{fact.numbers['held out']:.0f} samples better than a constant prediction does. "
                "Check whether the labels belong to their inputs. If they do, the task is too hard "
                "to learn from so few samples.",
                (Evidence("share of unseen labels that a small network explains", reference,
                          error),),
                (Advice("look at ten samples and their labels"),))  # fmt: skip


@fault("state-carried", "Outputs that depend on the batch before")
def state_carried(record: Record) -> Iterator[Finding]:
    """Find outputs that depend on the batch before.

    A queue and running statistics are meant to, and so is the state of series that go on.
    """
    for fact in record.found_by("state-carried"):
        of, goes_on = fact.words["of"], fact.words.get("goes on")
        if goes_on == "yes":
            continue
        badly = suffers(record)
        strength: Strength = "watch" if of == "sample" or badly else "note"
        yield Finding("state-carried", "act" if goes_on == "no" and badly else strength,
            "The outputs for a batch depend on the batch before it, with the same weights: the "
            "model carries a state from call to call."
            + " Each sample takes over the state of the sample at its place in the batch before"
              f"{', which is another series' if goes_on == 'no' else ''}." * (of == "sample"),
            (Evidence("share of outputs that change with a sample of the batch before",
                      fact.numbers["outputs"], 0.0, step=0),),
            (Advice("begin each batch with a fresh state, or let each batch go on where the one "
                    "before ended" if of == "sample" else
                    "look for what the model keeps from one call to the next, unless it is meant "
                    "to, as a queue or running statistics are"),), since=0)  # fmt: skip


@fault("batch-part-unread", "A part of the batch that the loss never reads")
def batch_part_unread(record: Record) -> Iterator[Finding]:
    """Find a tensor of the batch that the loss never reads, like another that it does read."""
    for fact in record.found_by("batch-part-unread"):
        unread, read = (f"{fact.numbers[name]:.0f}" for name in ("unread", "read"))
        yield Finding("batch-part-unread", "watch",
            f"The loss never reads tensor {unread} of the batch, of the same shape as tensor "
            f"{read}, which it reads (shape {fact.words['shape']}): changing it changes no loss.",
            (Evidence("tensors of the batch that the loss never reads", 1.0, 0.0, step=0),),
            (Advice("look for a place in the loss that uses one of the two twice, where it should "
                    "use both, unless it is left out on purpose"),), since=0)  # fmt: skip
