"""Can anything be learnt from the data?

Do inputs and labels differ, do batches, and are they shuffled? Is the target among the features, or
moved against its image? Last: do the labels belong to the inputs at all?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.could_train import FEWEST_SAME
from adiv_monitor.diagnosis.faults.fault import LEARNING, act_if, fault, finds, reported
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0
# Share of the target's variance that one feature explains; what is left may be rounding.
DETERMINED = 0.9999
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
# What does not differ → words for it, of the fact's numbers and words, and what to check.
_PREPARATION = "look for the step of the preparation after which they are equal"
_CONSTANT = {
    "input": ("All entries of input '{input}' are {value:g}", _PREPARATION),
    "inputs": ("All inputs are equal", _PREPARATION),
    "labels": ("All labels are {value:g}", _PREPARATION),
    "ignored": ("In {share:.0%} of the batches, the loss ignores all targets (ignore_index is "
                "{index:.0f}), and is NaN",
                "check the mask that chooses the targets to ignore: it may be inverted"),
    "rest": ("The loss ignores {share:.0%} of the targets (ignore_index is {index:.0f}), and all "
             "others are {value:g}", "choose an ignore_index that is no class, such as -100"),
}  # fmt: skip


@fault("constant-data", "Data without differences", certain=True, explains=(
       *LEARNING, "exploding", "labels-unrelated", "non-finite", "same-batch"))  # fmt: skip
def constant_data(record: Record) -> Iterator[Finding]:
    """Find data without any difference to learn from: in inputs, labels, or the targets left.

    Of an input that never varies, others do.
    """
    for fact in record.found_by("constant-data"):
        of = fact.words["of"]
        said, check = _CONSTANT.get(of, _CONSTANT["rest"])
        among = f" in {fact.numbers['samples']:.0f} samples" if "samples" in fact.numbers else ""
        is_part, coded = of == "input", fact.words.get("type") == "integer"
        yield Finding("constant-data", "note" if is_part and coded else act_if(not is_part),
            said.format(**{**fact.numbers, **fact.words}) + f"{among}.",
            (Evidence("different values", 1.0, 1.0, step=0),), (Advice(check),))  # fmt: skip


@fault("same-batch", "The same batch is repeated", of="monitor", certain=True,
       explains=("cannot-overfit", "behind-reference"),
       shown_by=lambda r: len(r.reports) >= FEWEST_SAME and reported("batch")(r))  # fmt: skip
def one_batch(record: Record) -> Iterator[Finding]:
    """Find inputs that are equal in all measured steps, and in the step after each."""
    sums = {r.batch for r in record.reports} | {r.next_batch for r in record.reports[:-1]}
    if len(record.reports) >= FEWEST_SAME and len(sums) == 1 and sums.pop():
        yield Finding("same-batch", "note",
            "Every measured step saw the same batch. That is meant, if these are all your data.",
            (Evidence("different batches in the measured steps", 1, 1),),
            (Advice("check that the data loader gives a new batch in each step"),))  # fmt: skip


@finds()
def same_batch(record: Record) -> Iterator[Finding]:
    """Find batches that repeat the same one or two, or samples that repeat within a batch."""
    for fact in record.found_by("same-batch"):
        of, numbers = fact.words["of"], fact.numbers
        if of == "samples":
            yield Finding("same-batch", "watch",
                f"At most {numbers['share']:.0%} of the samples of a batch differ from each other; "
                "the rest repeat them.",
                (Evidence("share of a batch's samples that differ", numbers["share"], 0.5),),
                (Advice("check whether the dataset uses its index, and the sampler"),),
                "Larger batches of the same samples teach no more.",
                against=())  # fmt: skip
        else:
            yield Finding("same-batch", "note" if of == "one" else "act",
                f"The number of different batches is {numbers['different']:.0f}, out of "
                f"{numbers['batches']:.0f}: the model never sees the rest of the data.",
                (Evidence("different batches", numbers["different"], 2.0),),
                (Advice("check which samples the loader returns (shuffle=True), and take a new "
                        "batch for each step: next(iter(loader)) begins again"),))  # fmt: skip


@fault("unshuffled", "The data are not shuffled", certain=True)
def unshuffled(record: Record) -> Iterator[Finding]:
    """Find batches whose labels are more alike than those of shuffled batches."""
    for fact in record.found_by("unshuffled"):
        ratio, z = fact.numbers["ratio"], fact.numbers["z"]
        if ratio < UNSHUFFLED and z < -DEVIATIONS:
            yield Finding("unshuffled", act_if(ratio < SORTED),
                f"The labels within a batch vary {ratio:.3g} times as much as in shuffled batches: "
                "the data are sorted.",
                (Evidence("variance of labels in a batch, over shuffled ones", ratio, UNSHUFFLED),
                 Evidence("distance from these, in deviations", z, -DEVIATIONS)),
                (Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),),
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
                f"{fact.numbers['samples']:.0f} samples: the model can copy it.",
                (Evidence("share of the target that a feature explains", share, DETERMINED),),
                (Advice("leave the target out of the inputs"),))  # fmt: skip


@fault("targets-moved", "Targets that are transposed or flipped", explains=LEARNING)
def targets_moved(record: Record) -> Iterator[Finding]:
    """Find targets for pixels that fit the images far better transposed, flipped or turned."""
    for fact in record.found_by("targets-moved"):
        own, best = fact.numbers["own"], fact.numbers["best"]
        if best > FITS and own < BETTER * best:
            yield Finding("targets-moved", act_if(suffers(record)),
                f"The targets of pixels fit the images better {MOVED[fact.words['move']]}: their "
                f"correlation is then {best:.2g} instead of {own:.2g}.",
                (Evidence("correlation of the pixels with their targets", own, BETTER * best),),
                (Advice("compare the axes and transforms of images and targets"),))  # fmt: skip


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
                "Check whether the labels belong to their inputs.",
                (Evidence("share of unseen labels that it explains", reference, error),),
                (Advice("look at ten samples and their labels"),))  # fmt: skip


@fault("state-carried", "Outputs that depend on the batch before")
def state_carried(record: Record) -> Iterator[Finding]:
    """Find outputs that depend on the batch before.

    A queue and running statistics are meant to, and so is the state of series that go on.
    """
    for fact in record.found_by("state-carried"):
        of_sample, goes_on = fact.words["of"] == "sample", fact.words.get("goes on")
        if goes_on != "yes":
            watch = of_sample or suffers(record)
            yield Finding("state-carried",
                act_if(goes_on == "no" and suffers(record)) if watch else "note",
                "The outputs for a batch depend on the batch before it, with the same weights."
                + " Each sample takes over the state of another sample." * of_sample,
                (Evidence("share of outputs that change", fact.numbers["outputs"], 0.0),),
                (Advice("begin each batch with a fresh state, unless series go on"),),
                since=0)  # fmt: skip


@fault("batch-part-unread", "A part of the batch that the loss never reads")
def batch_part_unread(record: Record) -> Iterator[Finding]:
    """Find a tensor of the batch that the loss never reads, like another that it does read."""
    for fact in record.found_by("batch-part-unread"):
        unread, read = fact.numbers["unread"], fact.numbers.get("read")
        flag = "which is 0 or 1 for each sample, as masks and ends of episodes are"
        like = flag if read is None else f"of the same shape as tensor {read:.0f}, which it reads"
        yield Finding("batch-part-unread", "watch",
            f"The loss never reads tensor {unread:.0f} of the batch, {like} (shape "
            f"{fact.words['shape']}).",
            (Evidence("tensors of the batch that the loss never reads", 1.0, 0.0, step=0),),
            (Advice("look for the place in the loss where this tensor belongs, and for another "
                    "that stands there"),), since=0)  # fmt: skip
