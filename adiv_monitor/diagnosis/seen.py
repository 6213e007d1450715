"""What a monitor's reports tell of questions that an audit asks copies of the model."""

import math
from collections.abc import Iterator, Sequence

from adiv_monitor.diagnosis.record import ActivatedOutput, Fact, Probed
from adiv_monitor.report import StepReport

COUNTED = 10  # batches of a new normalisation in the first step
FEWEST = 3  # reports, in all of which it must be so
OCCURS = 20  # samples of each class that occurs: then others that are as frequent would, too
SAMPLES = 1024  # labels of a step: more are those of pixels or tokens, which are alike in a sample
_OWN = {"CrossEntropyLoss": "softmax", "BCEWithLogitsLoss": "sigmoid"}  # of a loss
ENTRYWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


def seen_in(reports: Sequence[StepReport]) -> dict[str, Probed]:
    """Return the facts by question; fewer than three reports tell nothing."""
    found = {
        "broadcast-loss": _broadcast(reports),
        "seed-again": _seeded(reports),
        "softmax-over-samples": _over_samples(reports),
        "running-statistics": _momenta(reports),
        "class-untaught": never_occurring([*map(sum, zip(*_labels(reports), strict=True))]),
        "unshuffled": _sorted(reports),
    }
    enough = len(reports) >= FEWEST
    return {name: Probed(facts) for name, of in found.items() if enough and (facts := tuple(of))}


def activation_before(reports: Sequence[StepReport]) -> ActivatedOutput | None:
    """Return a function whose results the loss gets as logits in all steps; None: none is known."""
    seen = {(r.loss_module, r.outputs) for r in reports}
    loss, kind = seen.pop() if len(seen) == 1 and len(reports) >= FEWEST else ("", "")
    made_by = {"probabilities": _OWN, "rectified": dict.fromkeys(_OWN, "ReLU")}
    name = made_by.get(kind, {}).get(loss)
    return ActivatedOutput(name, None) if name else None


def chance_of(reports: Sequence[StepReport], losses: Sequence[float]) -> float | None:
    """Return ln C, the cross-entropy of C classes that are all as likely; None: it is not known.

    A sum over the samples begins far above it. A loss that never comes near it is of another kind,
    as of scores that are multiplied (ArcFace), or the mean of several heads.
    """
    if not (reports and losses and reports[0].loss_module == "CrossEntropyLoss"):
        return None
    logits, labels = (*reports[0].loss_shapes, (), ())[:2]
    if reports[0].step or not len(logits) == len(labels) + 1 > 1:  # resumed, or soft labels
        return None
    chance = math.log(logits[1])
    is_mean = losses[0] < chance * math.prod(labels) / 2
    return chance if is_mean and min(losses) < 1.05 * chance else None


def _broadcast(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield the shapes (N, 1) and (N), which torch's losses broadcast to (N, N)."""
    *_, last = (StepReport(0, {}, {}, 0.0), *reports)
    short, long = sorted(last.loss_shapes, key=len) if len(last.loss_shapes) == 2 else ((), ())
    if last.loss_module in ENTRYWISE and long == (*short, 1) and short and short[0] > 1:
        yield Fact(last.loss_module, {"times": short[0]}, {"of": str(long), "and": str(short)})


def _over_samples(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield that the loss gets a softmax over the samples in all steps."""
    if all(r.outputs == "over samples" for r in reports):
        loss, shape = reports[-1].loss_module, str(reports[-1].loss_shapes[0])
        yield Fact(f"The softmax before {loss or 'the loss'}", {}, {"shape": shape})


def never_occurring(totals: Sequence[int]) -> Iterator[Fact]:
    """Yield that classes never occur, though each other one, of two or more, does often enough."""
    occur = [count for count in totals if count]
    if 1 < len(occur) < len(totals) and min(occur) >= OCCURS:
        numbers = {"missing": len(totals) - len(occur), "classes": len(totals)}
        yield Fact("", {**numbers, "labels": sum(totals), "first": totals.index(0)})


def _sorted(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield how often labels of two samples of a batch differ, over those of any two samples.

    How far that is from shuffled batches is told by Pearson's χ² of batches and classes.
    """
    counts = [of for of in _labels(reports) if 0 < sum(of) <= SAMPLES]
    totals = [*map(sum, zip(*counts, strict=True))]
    alike, expected = _alike(counts), _alike([totals])
    if alike >= 0 and expected < 1 and len(counts) > 1:
        cells = [(x, sum(of) * t) for of in counts for x, t in zip(of, totals, strict=True) if x]
        chi = sum(totals) * (sum(x * x / product for x, product in cells) - 1)
        freedom = (len(counts) - 1) * (sum(t > 0 for t in totals) - 1)
        z = (freedom - chi) / math.sqrt(2 * freedom)
        yield Fact("", {"ratio": (1 - alike) / (1 - expected), "z": z})


def _labels(reports: Sequence[StepReport]) -> Sequence[tuple[int, ...]]:
    """Return how many samples of each class a loss of torch's own got in each step, if known."""
    seen = [report.labels for report in reports if report.labels and report.loss_module]
    return seen if len({*map(len, seen)}) == 1 else []


def _alike(counts: Sequence[Sequence[int]]) -> float:
    """Return the share of pairs within a batch that are of one class; −1: there are no pairs."""
    pairs = sum(n * (n - 1) for n in map(sum, counts))
    return sum(x * (x - 1) for of in counts for x in of) / pairs if pairs else -1.0


def _momenta(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield normalisations whose running statistics are no average in any step.

    If these hardly move, they must be new: those of a trained model may stay as they are.
    """
    first, *_, last = reports
    is_new = not first.step and (first.norm_passes or 0) <= COUNTED
    for path, momentum in last.norm_momenta.items():
        if all(path in r.norm_momenta for r in reports) and (momentum > 0.5 or is_new):
            yield Fact(path, {"momentum": momentum})


def _seeded(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield that steps which draw random numbers begin and end with the same state of them."""
    states = {r.random_states for r in reports}
    if len(states) == 1 and len({*states.pop()}) == 2:
        yield Fact("")
