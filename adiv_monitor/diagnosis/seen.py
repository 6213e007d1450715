"""What a monitor's reports tell of questions that an audit asks copies of the model."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev, variance

import numpy as np

from adiv_monitor.diagnosis.record import ActivatedOutput, Fact, Probed
from adiv_monitor.report import StepReport

COUNTED = 10  # batches of a new normalisation in the first step
FEWEST = 3  # reports, in all of which it must be so
OCCURS = 20  # samples of each class that occurs: then others that are as frequent would, too
SAMPLES = 1024  # labels of a step: more are those of pixels or tokens, which are alike in a sample
_OWN = {"CrossEntropyLoss": "softmax", "BCEWithLogitsLoss": "sigmoid"}  # of a loss
# Losses that are lowest for the shares of the classes, and whether their targets are real numbers.
_ENTROPIES = {"CrossEntropyLoss": False, "NLLLoss": False}
_ENTROPIES |= {"BCEWithLogitsLoss": True, "BCELoss": True}
ENTRYWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


def seen_in(reports: Sequence[StepReport]) -> dict[str, Probed]:
    """Return the facts by question; fewer than three reports tell nothing."""
    found = {
        "broadcast-loss": _broadcast(reports),
        "softmax-of-one": _single(reports),
        "seed-again": _seeded(reports),
        "softmax-over-samples": _over_samples(reports),
        "running-statistics": _momenta(reports),
        "class-untaught": never_occurring(_totals(reports)),
        "class-weights": _weights(reports),
        "unshuffled": _sorted(reports),
        "loss-stuck": _constant(reports),
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


def _single(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield the shape of scores of a single class, of which the cross-entropy is always 0."""
    name, shape = reports[-1].loss_module, (*reports[-1].loss_shapes, ())[0]
    if name == "CrossEntropyLoss" and len(shape) == 2 and shape[0] > 1 == shape[1]:
        yield Fact(name, {}, {"shape": str(shape)})


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


def _weights(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield how the weights of the classes, or of the positive ones, go with their numbers."""
    counts, weights = _totals(reports), reports[-1].loss_weights
    if len(counts) == len(weights):
        yield from balance(reports[-1].loss_module, weights, counts)


def balance(place: str, weights: Sequence[float], counts: Sequence[float]) -> Iterator[Fact]:
    """Yield the slope of the logarithm of weights over that of counts, where they differ.

    Weights that balance classes have a slope of −1, the square root of these −0.5, and counts in
    place of their inverses 1. Weights that balance them in another order are off by 0: the length
    of the sum of both, each sorted.
    """
    used = np.flatnonzero(np.minimum(weights, counts) > 0)
    w, n = (np.log(np.take(of, used)) for of in (weights, counts))
    if len(used) < 2 or min(np.ptp(w), np.ptp(n)) < math.log(2):
        return
    common, rare = used[n.argmax()], used[n.argmin()]
    w, n = w - w.mean(), n - n.mean()
    numbers = {"slope": w @ n / (n @ n), "correlation": w @ n / math.sqrt((w @ w) * (n @ n)),
               "off": math.dist(np.sort(w), np.sort(-n)) / math.sqrt(n @ n),
               "times": weights[common] / weights[rare],
               "more": counts[common] / counts[rare]}  # fmt: skip
    of = {"common": str(common), "rare": str(rare)}
    yield Fact(place, {name: float(x) for name, x in numbers.items()}, of)


def _sorted(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield how often labels of two samples of a batch differ, over those of any two samples.

    How far that is from shuffled batches is told by Pearson's χ² of batches and classes. Of real
    targets, yield the variance within batches over that of all, and how far the batches' means
    vary: their variance is that of a sample over the number of samples, if batches are shuffled.
    """
    counts = [of for of in _labels(reports) if 0 < sum(of) <= SAMPLES]
    totals = [*map(sum, zip(*counts, strict=True))]
    alike, expected = _alike(counts), _alike([totals])
    alone = not any(r.other_optimizers for r in reports)  # the batches of two players differ
    if alone and alike >= 0 and expected < 1 and len(counts) > 1:
        cells = [(x, sum(of) * t) for of in counts for x, t in zip(of, totals, strict=True) if x]
        chi = sum(totals) * (sum(x * x / product for x, product in cells) - 1)
        freedom = (len(counts) - 1) * (sum(t > 0 for t in totals) - 1)
        z = (freedom - chi) / math.sqrt(2 * freedom)
        yield Fact("", {"ratio": (1 - alike) / (1 - expected), "z": z})
    moments = [r.target_moments for r in reports if r.target_moments and not sum(r.labels)]
    if alone and len(moments) == len(reports) and any(of[0] > 0 for of in moments):
        variances, means = zip(*moments, strict=True)
        within, between = fmean(variances), variance(means)
        usual = within / math.prod(reports[-1].loss_shapes[-1][:1])  # between shuffled batches
        z = (1 - between / usual) * math.sqrt((len(means) - 1) / 2)
        yield Fact("", {"ratio": within / (within + between), "z": z}, {"of": "real"})


def _constant(reports: Sequence[StepReport]) -> Iterator[Fact]:
    """Yield the mean loss of the later half of the steps, and that of a constant prediction.

    It predicts the shares of the classes, for a cross-entropy, or the mean, for squared errors. Its
    loss is that for the same targets, and z is how far the losses lie below it, in standard errors
    of their paired differences. Steps of several losses may have different targets.
    """
    later, pairs = reports[len(reports) // 2 :], []
    mean = fmean([r.target_moments[1] for r in reports if r.target_moments] or [0.0])
    classes = len(reports[-1].labels)
    totals = [*map(sum, zip(*(r.labels for r in reports if len(r.labels) == classes), strict=True))]
    for r in later:
        constant = 0.0
        if r.target_moments and r.loss_module == "MSELoss":
            constant = r.target_moments[0] + (r.target_moments[1] - mean) ** 2
        elif _ENTROPIES.get(r.loss_module) == bool(r.target_moments) and len(r.labels) == classes:
            shares = zip(r.labels, totals, strict=True)
            constant = sum(n * math.log(sum(totals) / t) for n, t in shares if n)
            constant /= sum(r.labels) or 1
        plain = not r.loss_settings and {*r.loss_counts} == {1}
        if constant and plain and r.loss is not None and math.isfinite(r.loss + constant):
            pairs.append((r.loss, constant))
    if len(pairs) == len(later) >= FEWEST:
        loss, constant = (fmean(of) for of in zip(*pairs, strict=True))
        error = stdev(y - x for x, y in pairs) / math.sqrt(len(pairs))
        yield Fact("", {"loss": loss, "constant": constant, "z": (constant - loss) / (error or 1)})


def _totals(reports: Sequence[StepReport]) -> Sequence[int]:
    """Return how many samples of each class a loss of torch's own got in all steps, if known."""
    return [*map(sum, zip(*_labels(reports), strict=True))]


def _labels(reports: Sequence[StepReport]) -> Sequence[tuple[int, ...]]:
    """Return how many samples of each class a loss of torch's own got in each step, if known.

    Labels of pixels are none of samples.
    """
    of_samples = [r for r in reports if math.prod(((), *r.loss_shapes)[-1][1:]) == 1]
    seen = [r.labels for r in of_samples if r.labels and r.loss_module in _ENTROPIES]
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
