"""Can anything be learnt from the data?

Do inputs and labels differ, do batches, and are they shuffled? Is the target among the features, or
moved against its image? Last: do the labels belong to the inputs at all?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis.course import is_measure
from adiv_monitor.diagnosis.faults.could_train import FEWEST_SAME
from adiv_monitor.diagnosis.faults.fault import (
    LEARNING,
    Number,
    act_if,
    fault,
    finds,
    reported,
    told,
)
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import PLAIN
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import LayerReading

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0
# Share of the target's variance that one feature explains; what is left may be rounding.
DETERMINED = 0.9999
# Share of moved targets that is explained; and that of the targets as they are, over it.
# Less, if a model may be meant to move them itself.
FITS, BETTER, CLEARLY = 0.15, 0.5, 0.25
DRAWN = 0.3  # share of the targets' mean square that random numbers make
MIXED = 0.15  # share of the targets that fit their images better flipped
# A small network explains more than this share of unseen labels, and the model less than this share
# of what that explains; labels that a model of theirs explains so little of, with so many samples
# of each class, may not belong to their inputs.
EXPLAINS, BEHIND, LEARNT, PER_CLASS = 0.3, 0.25, 0.15, 20
EQUAL = 1e-5  # what is left of the rows' spread in single precision
# What does not differ → words for it, of the fact's numbers and words.
_CONSTANT = {
    "input": "All entries of input '{input}' are {value:g}",
    "inputs": "All inputs are equal",
    "labels": "All labels are {value:g}",
    "ignored": "In {share:.0%} of the batches, the loss ignores all targets (ignore_index is "
    "{index:.0f}), and is NaN",
    "rest": "The loss ignores {share:.0%} of the targets (ignore_index is {index:.0f}), and all "
    "others are {value:g}",
}


@fault("constant-data", "Data without differences", certain=True, explains=(
       *LEARNING, "exploding", "input-mean", "input-scale", "labels-unrelated", "non-finite",
       "same-batch"))  # fmt: skip
def constant_data(record: Record) -> Iterator[Finding]:
    """Find data without any difference to learn from: in inputs, labels, or the targets left.

    Of an input that never varies, others do.
    """
    for fact in record.found_by("constant-data"):
        of, mask = fact.words["of"], "index" in fact.numbers
        among = f" in {fact.numbers['samples']:.0f} samples" if "samples" in fact.numbers else ""
        coded = fact.words.get("type") == "integer"
        yield Finding("constant-data", "note" if coded else act_if(of != "input"),
            _CONSTANT[of].format(**fact.numbers, **fact.words) + f"{among}.",
            (Evidence("different values", 1.0, 1.0, step=0),),
            (Advice("check the mask that chooses the targets to ignore, and that ignore_index is "
                    "no class: the default is -100" if mask else
                    "look for the step of the preparation after which they are "
                    "equal"),))  # fmt: skip


@finds("monitor")
def equal_rows(record: Record) -> Iterator[Finding]:
    """Find that, in every measured step, all rows with a gradient of the first layer are equal."""
    firsts = [(path, x) for r in record.reports for path, x in [*r.layers.items()][:1]]
    known = [(path, x) for path, x in firsts if active_rows(x) > 1 and not x.non_finite]
    if len(known) >= FEWEST_SAME and all(_are_equal(x) for _, x in known):
        path = known[0][0]
        yield Finding("constant-data", act_if(suffers(record) and is_measure(record)),
            f"In every measured step, all samples have the same input to '{path}'.",
            (Evidence("different inputs", 1.0, 1.0, path),),
            (Advice("look for the step of the preparation after which they are equal"),)
            )  # fmt: skip


def active_rows(reading: LayerReading) -> int:
    """Return how many of the rows that were examined have a gradient."""
    return reading.rows_seen - reading.rows_without_gradient


def _are_equal(reading: LayerReading) -> bool:
    """Return whether all rows of a plain map are equal; its measures are NaN if they are all 0."""
    common, spread = reading.common_share, reading.scale_cv
    if common is None or spread is None or reading.kind not in PLAIN:
        return False
    return not (common <= 1 - EQUAL or spread >= EQUAL)


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


_DIFFERENT = [Number("different batches", "different")]
_SEEN = ("The number of different batches is {different:.0f}, out of {batches:.0f}: the model "
         "never sees the rest of the data.")  # fmt: skip
_LOADER = Advice("check which samples the loader returns (shuffle=True), and take a new batch for "
                 "each step: next(iter(loader)) begins again")  # fmt: skip
told(__name__, "same-batch", "", "note", _SEEN, _DIFFERENT, _LOADER,
     where=lambda fact: fact.words["of"] == "one")  # fmt: skip
told(__name__, "same-batch", "", "act", _SEEN, _DIFFERENT, _LOADER,
     where=lambda fact: fact.words["of"] == "batches")  # fmt: skip
told(__name__, "same-batch", "", "watch",
     "At most {share:.0%} of the samples of a batch differ from each other; the rest repeat them.",
     [Number("share of a batch's samples that differ", "share")],
     Advice("check whether the dataset uses its index, and the sampler"),
     where=lambda fact: fact.words["of"] == "samples",
     not_advised="Larger batches of the same samples teach no more.", against=())  # fmt: skip


told(__name__, "unshuffled", "The data are not shuffled",
     lambda record: record.found_by("unshuffled")[0].numbers["ratio"] < SORTED,
     "The labels within a batch vary {ratio:.3g} times as much as in shuffled batches: the data "
     "are sorted.",
     [Number("variance of labels in a batch, over shuffled ones", "ratio", below=UNSHUFFLED),
      Number("distance from these, in deviations", "z", below=-DEVIATIONS)],
     Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),
     not_advised="Larger batches of sorted data are sorted too.", against=(),
     certain=True)  # fmt: skip


told(__name__, "target-leak", "A feature that is the target", "watch",
     "Feature {feature:.0f} of {place} determines the target of all {samples:.0f} samples: the "
     "model can copy it.",
     [Number("share of the target that a feature explains", "share", above=DETERMINED)],
     Advice("leave the target out of the inputs"))  # fmt: skip


def _are_misplaced(record: Record) -> bool:
    """Return whether the order of targets is wrong for sure, or may be, and the run suffers."""
    order = record.found_by("targets-moved")[0].words.get("order")
    return order == "wrong" or (order == "unclear" and suffers(record))


told(__name__, "targets-moved", "Targets in another order than their inputs", _are_misplaced,
     "The targets do not belong to the places of their outputs: {move}, they fit better. Then the "
     "inputs of the last layer explain {best:.0%} of them, and {own:.0%} as they are.",
     [Number("share of moved targets that the last layer's inputs explain", "best", above=FITS),
      Number("share of the targets as they are", "own")],
     Advice("compare the order, the axes and the transforms of inputs and targets"),
     where=lambda fact: fact.numbers.get("own", 1.0) < fact.numbers.get("best", 0.0)
     * (CLEARLY if fact.words.get("order") == "meant" else BETTER),
     explains=LEARNING)  # fmt: skip


told(__name__, "targets-moved", "", suffers,
     "{share:.0%} of the targets of pixels fit their images better if they are flipped ('{move}'), "
     "and the others do not.",
     [Number("share of the targets that fit better flipped", "share", above=MIXED,
            below=1 - MIXED)],
     Advice("flip images and targets together"), where=lambda fact: "share" in fact.numbers
     )  # fmt: skip


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


told(__name__, "labels-unrelated", "", suffers,
     "The targets are random numbers that the model can't know: those that {place} draws make "
     "{share:.0%} of them, and no input depends on these.",
     [Number("share of the targets that is drawn", "share", above=DRAWN)],
     Advice("draw once, and use the same numbers for inputs and targets"))  # fmt: skip
told(__name__, "labels-unrelated", "", "watch",
     "The targets' {of} in all {batches:.0f} batches, as of targets that are numbered, or "
     "normalised, by each batch anew: they mean something else in another batch.",
     [Number("batches in which that is so", "batches")],
     Advice("number and normalise the targets once, for all data"),
     where=lambda fact: "batches" in fact.numbers)  # fmt: skip


@fault("state-carried", "Outputs that depend on the batch before")
def state_carried(record: Record) -> Iterator[Finding]:
    """Find outputs that depend on the batch before.

    A queue and running statistics are meant to, and so is the state of series that go on.
    """
    for fact in record.found_by("state-carried"):
        mixes, suffering = fact.words["of"] == "sample", suffers(record)
        if (goes_on := fact.words.get("goes on")) != "yes":
            strength = act_if(goes_on == "no" and suffering)
            yield Finding("state-carried", strength if mixes or suffering else "note",
                "The outputs for a batch depend on the batch before it, with the same weights."
                + " Each sample takes over the state of another sample." * mixes,
                (Evidence("share of outputs that change", fact.numbers["outputs"], 0.0),),
                (Advice("begin each batch with a fresh state, unless series go on"),),
                since=0)  # fmt: skip


_UNREAD = "The loss never reads tensor {unread:.0f} of the batch (shape {shape}), "
_PLACE = Advice("look for the place in the loss where this tensor belongs, and for another that "
                "stands there")  # fmt: skip
told(__name__, "batch-part-unread", "A part of the batch that the loss never reads", "watch",
     _UNREAD + "although it reads tensor {read:.0f} of the same shape.",
     [Number("number of the tensor in the batch", "unread")], _PLACE,
     where=lambda fact: "read" in fact.numbers)  # fmt: skip
told(__name__, "batch-part-unread", "", "watch",
     _UNREAD + "which is 0 or 1 for each sample, as masks and ends of episodes are.",
     [Number("number of the tensor in the batch", "unread")], _PLACE,
     where=lambda fact: "read" not in fact.numbers)  # fmt: skip
