"""Can anything be learnt from the data?

Do inputs and labels differ, do batches, and are they shuffled? Is the target moved
against its image? Last: do the labels belong to the inputs at all?
"""

from collections.abc import Iterator
from statistics import fmean, median

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import is_measure
from adiv_monitor.diagnosis.faults import could_train
from adiv_monitor.diagnosis.faults.could_train import FEWEST_MEASURED, FEWEST_SAME, goes_badly
from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, fault, finds, loop_fault, told
from adiv_monitor.diagnosis.faults.rates import overshoot, suffers
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.readings import named
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report.wording import percent

# Variance of labels within batches over that of shuffled ones, and by how many standard deviations
# it must be less.
UNSHUFFLED, SORTED, DEVIATIONS = 0.7, 0.3, 6.0
# Share of moved targets that is explained; and that of the targets as they are, over it.
# Less, if a model may be meant to move them itself.
FITS, BETTER, CLEARLY = 0.15, 0.5, 0.25
DRAWN = 0.3  # share of the targets' mean square that random numbers make
HARDLY = 0.1  # of the inputs' mean square; a usual schedule of noise has more than half
# A small network explains more than this share of unseen labels, and the model less than this share
# of what that explains; labels that a model of theirs explains so little of, with so many samples
# of each class, may not belong to their inputs.
EXPLAINS, BEHIND, LEARNT, PER_CLASS = 0.3, 0.25, 0.15, 20
# gradient_cosine of the last layer, typically: in shuffled batches of a classification it is below
# 0.4, in generators and critics up to 0.94, in sorted data above 0.99.
ALIKE = 0.97
NEARLY = 0.95  # of the rows
# Variance of the sums of 90 % of the batches, over that of batches that are drawn at random: 0.2 to
# 1.5 for shuffled data; and the fewest steps that show it.
APART, FEWEST_APART = 3.0, 8
# Deviation of the samples' weighted sums over their mean: in healthy runs 0.1 and more, of uniform
# random images of 224 × 224 0.0016, of pixels divided by 255 twice and then normalised 0.0003.
HARDLY_DIFFER = 1e-3
# What does not differ → words for it, of the fact's numbers and words.
_CONSTANT = {
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
    """Find data without any difference to learn from: in inputs, labels, or the targets left."""
    for fact in record.found_by("constant-data"):
        of, mask = fact.words["of"], fact.words["of"] in ("ignored", "rest")
        among = f" in {fact.numbers['samples']:.0f} samples" if "samples" in fact.numbers else ""
        yield Finding("constant-data", "act",
            _CONSTANT[of].format(**fact.numbers, **fact.words) + f"{among}.",
            (Evidence("different values", 1.0, 1.0, step=0),),
            (Advice("check the mask that chooses the targets to ignore, and that ignore_index is "
                    "no class: the default is -100" if mask else
                    "look for the step of the preparation after which they are "
                    "equal"),))  # fmt: skip


@finds("monitor")
def hardly_differ(record: Record) -> Iterator[Finding]:
    """Find inputs of which next to nothing differs between the samples of a batch."""
    size = max((of[0] for r in record.reports for of in r.loss_shapes[:1] if of), default=1)
    shares = [size**0.5 * abs(b / a) for a, b in _sums(record) if a and b]
    if len(shares) >= FEWEST_MEASURED and max(shares) < HARDLY_DIFFER and goes_badly(record):
        yield Finding("constant-data", act_if(is_measure(record)),
            "The inputs hardly differ between samples: the sum over all entries of a sample "
            f"deviates by {max(shares):.1g} of its mean.",
            (Evidence("deviation between samples, over the mean", max(shares), HARDLY_DIFFER),),
            (Advice("look for a division that is done twice, as of pixels by 255, in front of a "
                    "normalisation, and for features of a far larger mean than spread"),),
            )  # fmt: skip


def _sums(record: Record) -> list[tuple[float, float]]:
    """Return the weighted sum of each measured batch's first tensor, and its usual difference."""
    return [(r.batch[0], r.batch_spread[0]) for r in record.reports if r.batch and r.batch_spread]


@fault("same-batch", "The same batch is repeated", of="monitor", certain=True,
       explains=("cannot-overfit", "behind-reference"),
       shown_by=lambda r: len(r.reports) >= FEWEST_SAME and read.reported("batch")(r))  # fmt: skip
def one_batch(record: Record) -> Iterator[Finding]:
    """Find inputs that are equal in all measured steps, and in the step after each."""
    sums = {r.batch for r in record.reports} | {r.next_batch for r in record.reports[:-1]}
    if len(record.reports) >= FEWEST_SAME and len(sums) == 1 and sums.pop():
        yield Finding("same-batch", "note",
            "Every measured step saw the same batch. That is meant, if these are all your data.",
            (Evidence("different batches in the measured steps", 1, 1),),
            (Advice("check that the data loader gives a new batch in each step"),))  # fmt: skip


_DIFFERENT = Number("different batches", "different")
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
     Number("share of a batch's samples that differ", "share"),
     Advice("check whether the dataset uses its index, and the sampler"),
     where=lambda fact: fact.words["of"] == "samples",
     not_advised="Larger batches of the same samples teach no more.", against=())  # fmt: skip


def _are_a_series(record: Record) -> bool:
    """Return whether targets may be in order on purpose: of no classes, and better than a mean."""
    stuck = any(of.numbers["loss"] > of.numbers["constant"] for of in record.found_by("loss-stuck"))
    is_real = record.found_by("unshuffled")[0].words.get("of") == "real"
    return is_real and not stuck and not goes_badly(record)


unshuffled = told(__name__, "unshuffled", "The data are not shuffled",
     lambda record: record.found_by("unshuffled")[0].numbers["ratio"] < SORTED
     if record.is_audited else goes_badly(record),
     "The targets within a batch vary {ratio:.3g} times as much as in shuffled batches: the data "
     "are sorted.",
     Number("variance of labels in a batch, over shuffled ones", "ratio", below=UNSHUFFLED),
     Number("distance from these, in deviations", "z", below=-DEVIATIONS),
     Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),
     not_advised="Larger batches of sorted data are sorted too.", against=(),
     unless=_are_a_series, certain=True, explains=LEARNING)  # fmt: skip


told(__name__, "target-leak", "The target is among the inputs", "watch",
     "Entry {entry:.0f} of {place} determines the target of all {samples:.0f} samples: the model "
     "can copy it.",
     Advice("leave the target out of the inputs, and end windows before it"))  # fmt: skip


def _are_misplaced(record: Record) -> bool:
    """Return whether the order of targets is wrong for sure, or may be, and the run suffers."""
    order = record.found_by("targets-moved")[0].words["order"]
    return order == "wrong" or (order == "unclear" and suffers(record))


def _are_of_one_sample(record: Record) -> bool:
    """Return whether samples would have to be exchanged that outputs and targets share."""
    together = any(fact.numbers["share"] == 1 for fact in record.found_by("targets-misplaced"))
    return together and "axes 0 and" in record.found_by("targets-moved")[0].words["move"]


told(__name__, "targets-moved", "Targets in another order than their inputs", _are_misplaced,
     "The targets do not belong to the places of their outputs: {move}, they fit better. Then the "
     "inputs of the last layer explain {best:.0%} of them, and {own:.0%} as they are.",
     Number("share of moved targets that the last layer's inputs explain", "best", above=FITS),
     Advice("compare the order, the axes and the transforms of inputs and targets"),
     where=lambda fact: fact.numbers["own"] < fact.numbers["best"]
     * (CLEARLY if fact.words["order"] == "meant" else BETTER),
     unless=_are_of_one_sample, explains=LEARNING)  # fmt: skip


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
     Number("share of the targets that is drawn", "share", above=DRAWN),
     Advice("draw once, and use the same numbers for inputs and targets"),
     where=lambda fact: not fact.numbers["held"])  # fmt: skip
told(__name__, "labels-unrelated", "", "watch",
     "The targets are the noise that {place} draws ({share:.0%} of them), but it makes only "
     "{held:.1%} of what the model gets: the inputs hold hardly any noise.",
     Number("share of the inputs that is noise", "held", below=HARDLY),
     Number("share of the targets that is noise", "share", above=DRAWN),
     Advice("look at the noise levels: they follow from the cumulated product of the alphas, not "
            "from the alpha of one step"),
     where=lambda fact: fact.numbers["held"])  # fmt: skip


@loop_fault("targets-ignored", "Nearly no row has a gradient", shown_by=read.stepped)
def targets_ignored(record: Record) -> Iterator[Finding]:
    """Find that typically nearly all rows of the last layer have no gradient."""
    seen = [r.layers[p] for r in record.reports for p in read.maps(record)[-1:] if p in r.layers]
    shares = [x.idle_share for x in seen if x.idle_share is not None and not x.non_finite]
    if len(shares) >= FEWEST_MEASURED and NEARLY <= (share := median(shares)) < 1:
        yield Finding("targets-ignored", "watch" if goes_badly(record) else "note",
            f"In a typical step, {percent(share)} of the rows of the last layer have no gradient: "
            "the loss ignores these targets, or hides them by a mask.",
            (Evidence("share of the rows without a gradient", share, NEARLY),),
            (Advice("count the targets that the loss does not ignore (ignore_index, masks, "
                    "weights)"),))  # fmt: skip


@finds("monitor")
def sorted_samples(record: Record) -> Iterator[Finding]:
    """Find batches whose samples all ask the last layer for the same change, as sorted data do."""
    *_, (path, cosine) = ("", None), *read.by_layer(record, "gradient_cosine").items()
    if len(record.reports) < FEWEST_SAME or cosine is None or could_train.halves(record):
        return
    if record.found_by("unshuffled"):  # the labels are known
        return
    if cosine.above(ALIKE) and is_measure(record) and overshoot(record) is None:
        yield Finding("unshuffled", act_if(goes_badly(record)),
            "The samples of a batch seem to be sorted by their class or target: in a typical step, "
            f"all ask {named(record, path)} for the same change (cosine {cosine.value:.3g}).",
            (Evidence("gradient_cosine", cosine.value, ALIKE, path),),
            (Advice("shuffle the samples (shuffle=True), unless their order is to be learnt"),),
            "Larger batches of sorted data are sorted too.", against=())  # fmt: skip


@loop_fault("batches-apart", "Batches that differ more than their samples",
            shown_by=lambda record: len(record.reports) >= FEWEST_APART)  # fmt: skip
def apart(record: Record) -> Iterator[Finding]:
    """Find inputs that differ between batches by far more than random samples do."""
    seen = _sums(record)
    if len(seen) < FEWEST_APART or not goes_badly(record) or not is_measure(record):
        return
    if any(unshuffled(record)):  # then inputs differ, too
        return
    middle, usual = (median(of) for of in zip(*seen, strict=True))
    squares = sorted((total - middle) ** 2 for total, _ in seen)
    most = squares[: len(squares) * 9 // 10]  # the last batch of an epoch may be smaller
    times = fmean(most) / usual**2 if usual > 0 else 0.0
    if times > APART:
        yield Finding("batches-apart", "watch",
            f"The inputs' means differ from batch to batch: their variance is {times:.3g} times "
            "that of batches of random samples. Features may be shuffled or prepared anew in each "
            "batch, the data may drift, or be sorted.",
            (Evidence("variance between batches, over random ones", times, APART),),
            (Advice("compare the statistics of single features in two batches"),))  # fmt: skip


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


_UNREAD = Number("number of the tensor in the batch", "unread")
told(__name__, "batch-part-unread", "A part of the batch that the loss never reads", "watch",
     "The loss never reads tensor {unread:.0f} of the batch (shape {shape}).",
     _UNREAD, Advice("look for the place in the loss where this tensor belongs, and for another "
                     "that stands there"),
     where=lambda fact: not {"drawn", "columns"} & fact.words.keys())  # fmt: skip
told(__name__, "batch-part-unread", "", "watch",
     "The loss never reads columns {columns} of tensor {unread:.0f} of the batch (shape {shape}).",
     _UNREAD, Advice("look for an index in the loss that does not move"),
     where=lambda fact: "columns" in fact.words)  # fmt: skip
told(__name__, "batch-part-unread", "", "act",
     "The loss never reads tensor {unread:.0f} of the batch, and draws as many numbers anew "
     "({drawn}): what belongs to the stored ones, such as rewards, does not belong to these.",
     _UNREAD,
     Advice("take the stored actions, or samples, in place of new ones"),
     where=lambda fact: "drawn" in fact.words)  # fmt: skip
