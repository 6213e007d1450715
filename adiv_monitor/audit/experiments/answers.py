"""The loss of other outputs than the model's, such as the targets themselves."""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import calls_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import (
    RepeatedLoss,
    given_inputs,
    noting,
    of_few,
    only_target,
    passed,
    still,
    with_tensor,
)
from adiv_monitor.audit.experiments.loss_inputs import CLASSIFIES, LOSSES, parts_like
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

Losses = tuple[float, float]


class Answered:
    """The loss of a batch for any outputs of the model.

    Attributes:
        outputs: The model's own first output of floating point; None: it has none.
        first: The loss of the model's own outputs.
    """

    def __init__(self, fork: Fork, batch: Any) -> None:
        made: list[Tensor] = []
        self._model, self._loss, self._batch = fork.model, RepeatedLoss(fork), batch
        with fork.model.register_forward_hook(noting(made)):
            self.first = self._loss.of(batch)
        self.outputs = next(iter(made), None)

    def loss(self, outputs: Tensor) -> float:
        """Return the loss of these outputs."""

        def instead(x: Tensor) -> Tensor:
            return outputs.to(x.dtype) if x.shape == outputs.shape else x

        with self._model.register_forward_hook(lambda m, args, out: mapped(out, instead)):
            return self._loss.of(self._batch)


def _preferred(
    setup: Setup, find: Callable[[Answered, Tensor], Losses | None]
) -> tuple[Tensor, Losses] | None:
    """Return what is found of the first batch's only target, in the shape of the outputs."""
    batch = of_few(setup).batches[0]
    of = Answered(setup.fork(), batch)
    for x in tensors(batch):
        target = None if of.outputs is None else _as_output(of.outputs, x)
        if target is None or (losses := find(of, target)) is None:
            continue
        if only_target(setup, batch) is x:
            return target, losses
    return None


def _as_output(output: Tensor, x: Tensor) -> Tensor | None:
    """Return numbers, zeros and ones, or classes as such, in the output's shape; else None.

    What has two other values, such as signs, may be meant as a weight of the outputs.
    """
    if x.is_complex() or output.ndim < 1 or not x.numel():
        return None
    if x.numel() == output.numel():
        values = torch.unique(x)
        if (x.is_floating_point() and len(values) > 2) or {*values.tolist()} == {0, 1}:
            return x.reshape(output.shape).to(output)
    classes = output.shape[1] if output.ndim > 1 else 0
    is_class = not x.is_floating_point() and x.dtype is not torch.bool and classes > 1
    fits = is_class and x.numel() * classes == output.numel()
    if not fits or not 0 <= int(x.min()) <= int(x.max()) < classes:
        return None
    places = x.reshape(len(output), *output.shape[2:]).long()
    return functional.one_hot(places, classes).movedim(-1, 1).to(output)


# Logits in place of probabilities

# Relative to the first loss, or that of wrong outputs if it is smaller: outputs that equal the
# targets have a loss that is closer to 0 than `PERFECT`, and outputs of twice the targets one that
# is lower by at least `LOWER`.
PERFECT, LOWER = 0.05, 0.1
OUTSIDE = 0.05  # share of the trained model's outputs below 0 or above 1, at least


@asks("logits-as-probabilities")
def logits_as_probabilities(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Replace the outputs by the targets, of 0 and 1, and by twice the targets.

    A loss of logits is not zero where these equal the targets, and a loss of probabilities is
    nowhere lower. One that is zero there and lower beyond has its lowest value elsewhere.
    """
    if (found := _preferred(setup, _beyond)) is None:
        return
    x = Answered(setup.fork_like(trained), setup.batches[0]).outputs
    outside = 0.0 if x is None else float(((x < 0) | (x > 1)).float().mean())
    if outside >= OUTSIDE:
        at, beyond = found[1]
        yield Fact("", {"at": at, "beyond": beyond, "outside": outside})


def _beyond(of: Answered, target: Tensor) -> Losses | None:
    """Return the loss of the targets, and of twice the targets, as outputs; None: not lower."""
    if not _is_binary(target):
        return None
    at, beyond = of.loss(target), of.loss(2 * target)
    # Of logits of both signs, a loss that divides by their sum may be of any size.
    scale = min(abs(of.first), abs(of.loss(1 - target)))
    # NaN is neither.
    return (at, beyond) if abs(at) < PERFECT * scale and beyond < at - LOWER * scale else None


# Targets that outputs had better contradict

LOGIT, LINEAR = 8.0, 1e-3  # the latter: rounding of a loss that is linear in the outputs


@asks("loss-reversed")
def loss_reversed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Replace the outputs by the targets, of 0 and 1, and by their opposite.

    This is done as probabilities, p and 1 − p, and as logits, ±8, because a loss of probabilities
    may not tell logits apart. In place of numbers stand those of other samples, unless the loss is
    linear in the outputs. Distances, which are never negative, may be meant to contradict. A
    surrogate, as in policy gradients, has the right gradient whatever its value is: nothing is
    found unless the training makes the outputs agree less.
    """
    if (found := _preferred(setup, _contrary)) is None:
        return
    target, (right, wrong) = found
    batch = of_few(setup).batches[0]
    before, after = (Answered(x, batch).outputs for x in (setup.fork(), setup.fork_like(trained)))
    # Outputs that are no longer finite do not show that the training is a good one.
    if before is None or after is None or _agreement(after, target) >= _agreement(before, target):
        return
    kind = "signed" if bool((after < 0).any()) else "positive"
    yield Fact("", {"right": right, "wrong": wrong}, {"outputs": kind})


def _contrary(of: Answered, target: Tensor) -> Losses | None:
    """Return the losses of right and of wrong outputs; None: that of the right ones is lower."""
    logits = LOGIT * (2 * target - 1)
    answers = [(target, 1 - target), (logits, -logits)]
    if not _is_binary(target):
        answers = [(target, target.roll(1, 0))]
        twice, once, none = (of.loss(times * target) for times in (2, 1, 0))
        if math.isclose(twice + none, 2 * once, rel_tol=LINEAR):
            return None  # such a target weighs the outputs
    pairs = [(of.loss(x), of.loss(y)) for x, y in answers]
    is_reversed = all(right - wrong > LOWER * abs(of.first) for right, wrong in pairs)
    return pairs[-1] if is_reversed else None


def _agreement(outputs: Tensor, target: Tensor) -> float:
    """Return the covariance of outputs and targets."""
    return float((outputs * (target - target.mean())).mean())


def _is_binary(target: Tensor) -> bool:
    return bool(((target == 0) | (target == 1)).all())


# Outputs and targets of different samples

FEWEST = 4  # samples of the batch
# A sample's inputs and targets may concern this many times its share of the outputs; where they
# concern more, samples are mixed on purpose, as nodes of a graph are.
ITS_SHARE = 1.5


@asks("targets-misplaced")
def targets_misplaced(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Exchange the first sample's inputs, those of the rest, and the first one's targets.

    Inputs concern the outputs that change. Targets, which change no outputs, concern those whose
    gradient changes. The share of these that the first sample's inputs concern, of all that inputs
    concern, is 1 if they belong together: of an output that no input changes nobody can tell.
    """
    batch = of_few(setup).batches[0]
    size = size_of(batch)
    if size < FEWEST or any(x.ndim and len(x) != size for x in tensors(batch)):
        raise Untold(f"fewer than {FEWEST} samples, or the tensors of a batch are of unlike length")
    own = passed(still(setup.fork()), batch)
    of_first = of_rest = of_targets = torch.zeros_like(own.outputs, dtype=torch.bool)
    counts = own.gradients != 0
    for number, x in enumerate(tensors(batch)):
        others = [i for i, y in enumerate(x) if not torch.equal(y, x[0])] if x.ndim else []
        if others:
            orders = [others[0], *range(1, size)], [0, *range(2, size), 1]
            puts = (with_tensor(batch, number, itemgetter(order)) for order in orders)
            first, rest = (passed(still(setup.fork()), put) for put in puts)
            counts = counts | (first.gradients != 0)
            moved = first.outputs != own.outputs
            of_first, of_rest = of_first | moved, of_rest | (rest.outputs != own.outputs)
            of_targets = of_targets | ((first.gradients != own.gradients) & ~moved.any())
    known = int((of_targets & (of_first | of_rest)).sum())
    most = max(int((of_first & counts).sum()), int(of_targets.sum()))
    if not known or most > ITS_SHARE * int(counts.sum()) / size:
        raise Untold("inputs or targets of a sample concern the outputs of several, or of none")
    yield Fact("", {"share": float((of_first & of_targets).sum()) / known})


# Pairs

_PASSES = 8  # most batches whose pairs are counted
_NEAR = 0.1  # of the distance between the outputs of a pair


@asks("pairs-reversed")
def pairs_reversed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how often pairs that are drawn together are nearer in the inputs than others.

    The loss calls the model with two tensors, or the three of a triplet, and gets one output for
    each. A pair (u, v) with outputs (a, b), a the first one, and the loss's gradient g at b is
    drawn together if g · (b − a) > 0, and pushed apart if it is below 0: what labels mean to the
    loss does not count, but what it does. The share
    is of all couples of a pair drawn together and one pushed apart (Mann and Whitney, 1947). Labels
    that say nothing about the inputs give 1/2, with a standard error of √((m + n + 1) / 12mn).
    """
    fork, pairs = setup.fork(), []
    for batch in setup.batches[:_PASSES]:
        if (pair := _pair(fork, batch)) is None:
            return
        pairs.append(pair)
    pull, distance = map(torch.cat, zip(*pairs, strict=True))
    near, far = distance[pull > 0], distance[pull < 0]
    if not near.numel() or not far.numel():
        return
    share = (0.5 - 0.5 * (near[:, None] - far).sign().double()).mean().item()
    error = math.sqrt((len(near) + len(far) + 1) / (12 * len(near) * len(far)))
    yield Fact("", {"share": share, "errors": (share - 0.5) / error})


def _pair(fork: Fork, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the pull on each pair, and the distance of its inputs; None: there are no pairs.

    Outputs are moved towards the first one, so that a margin leaves no pair out.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def near(x: Tensor) -> Tensor:
        if outputs and x.shape == outputs[0].shape:
            x = (outputs[0] + _NEAR * (x - outputs[0])).detach().requires_grad_()
        outputs.append(x)
        return x

    def instead(module: nn.Module, args: Any, output: Any) -> Any:
        inputs.extend(tensors(args))
        return mapped(output, near)

    with fork.model.register_forward_hook(instead), torch.enable_grad():
        loss = see_calls(fork, lambda call: None, batch)
    if not 1 < len(inputs) == len(outputs) < 4 or not outputs[0].requires_grad:
        return None
    (u, *v), (a, *b) = inputs, outputs
    alike = {x.shape for x in inputs} == {u.shape} and {x.shape for x in outputs} == {a.shape}
    if not alike or len(u) != len(a) or min(u.ndim, a.ndim) < 2 or not u.is_floating_point():
        return None
    pulls = [(g * (x - a).detach()).flatten(1).sum(1)
             for x, g in zip(b, torch.autograd.grad(loss, b), strict=True)]  # fmt: skip
    return torch.cat(pulls), torch.cat([(x - u).flatten(1).norm(dim=1) for x in v])


# A small network's answers

EVERY = 4  # one of so many batches is held out
BATCHES = 8  # fewest different batches
SAMPLES = 100  # fewest samples that are held out
EXPLAINS = 0.3  # of the labels: what a small network must explain
MOST_SAMPLES, MOST_FEATURES, HIDDEN = 2048, 512, 256
PENALTY, FAR = 0.1, 5.0  # times the number of samples; spreads that an entry counts at most
OF_LABELS = (*CLASSIFIES, *LOSSES, "gaussian_nll_loss")
_UNKNOWN = "no known loss of one label for each sample is called with a part of the batch"


@asks("behind-reference")
def behind_reference(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the skills of a small network on unseen samples, and of the model on the same.

    The model is not asked where the network explains something, but less than `EXPLAINS`.
    """
    given = list({id(batch): batch for batch in setup.batches}.values())
    if len(given) < BATCHES:
        raise Untold(f"{len(given)} different batches: too few to hold some out")
    fork = setup.fork()
    _, first = _compared(fork, given[0])
    y = [part.detach().flatten().cpu().to(first.dtype) for part in parts_like(first, given)]
    if not y:
        raise Untold(_UNKNOWN)
    x = [_inputs(fork, *pair) for pair in zip(given, y, strict=True)]
    rows, told = torch.cat(x), torch.cat(y)
    # A sample that is given again, as in a second epoch, is one: it is not seen and held out.
    once = [*{row.numpy().tobytes(): i for i, row in enumerate(rows)}.values()]
    held = once[EVERY - 1 :: EVERY]
    kept = [i for number, i in enumerate(once, 1) if number % EVERY][:MOST_SAMPLES]
    seen, labels, others = rows[kept], told[kept], told[held]
    if len(others) < SAMPLES:
        raise Untold(f"fewer than {SAMPLES} samples to hold out")
    if not bool(seen.isfinite().all()) or min(len(set(z.tolist())) for z in (labels, others)) < 2:
        raise Untold("inputs that are not finite, or labels that are all alike")
    found, error = skill(_predicted(seen, labels, rows[held], setup.seed), others)
    if error < found < EXPLAINS:
        return ()
    is_values = labels.is_floating_point()
    numbers = {
        "reference": found,
        "error": error,
        # Predictions that are worse than a constant explain nothing: their share is negative.
        "model": max(0.0, _own_share(setup.fork_like(trained), given[EVERY - 1 :: EVERY], found)),
        "per class": math.inf if is_values else len(labels) / len(set(labels.tolist())),
        "held out": float(len(others)),
    }
    return (Fact("", numbers),)


def _inputs(fork: Fork, batch: Any, labels: Tensor) -> Tensor:
    """Return the features of a batch's inputs (samples, features)."""
    given = [x for x in given_inputs(fork, batch).values() if not parts_like(labels, [x])]
    if not given:
        raise Untold("the model is not called with a part of the batch")
    return torch.cat([_features(x.cpu()) for x in given], 1)


@torch.no_grad()
def _compared(fork: Fork, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what the first loss of one label for each sample gets: scores and true labels.

    Of classes, these are (samples, classes) and integers; values are in float64.
    """
    size = size_of(batch)
    for call in calls_of(fork, lambda call: call.name in OF_LABELS, batch):
        given, target = (x.detach().cpu() for x in call.args[:2])
        if target.numel() != size:
            continue
        if given.ndim == 2 and len(given) == size and not target.is_floating_point():
            return given, target.flatten().long()
        if given.numel() == size:
            return given.flatten().double(), target.flatten().double()
    raise Untold(_UNKNOWN)


def _features(x: Tensor) -> Tensor:
    """Return samples' entries, averaged over neighbours if there are many; counts of words."""
    if not x.is_floating_point():
        words = x.reshape(len(x), -1).long() % MOST_FEATURES
        return torch.zeros(len(x), MOST_FEATURES).scatter_add_(1, words, torch.ones(words.shape))
    x = x.float().reshape(len(x), 1, -1)
    return functional.adaptive_avg_pool1d(x, min(MOST_FEATURES, x.shape[2]))[:, 0]


def _predicted(x: Tensor, labels: Tensor, unseen: Tensor, seed: int) -> Tensor:
    """Return what a network predicts whose hidden layer is drawn.

    Its last layer is fitted by least squares, with a penalty. Numbers that stand for missing values
    are brought near.
    """
    low, mean, high = x.quantile(torch.tensor([0.16, 0.5, 0.84]), 0)
    std = (high - low) / 2
    std = std.where(std > 0, x.std(0)).where(x.std(0) > 0, 1.0)  # of entries that are mostly zero
    with seeded(seed):
        weight = torch.randn(x.shape[1], HIDDEN) / math.sqrt(x.shape[1])
        bias = torch.randn(HIDDEN)
    inside, outside = (
        torch.cat([torch.ones(len(z), 1), z, torch.tanh(z @ weight + bias)], 1).double()
        for z in (((y - mean) / std).clamp(-FAR, FAR) for y in (x, unseen))
    )
    is_values, classes = labels.is_floating_point(), torch.unique(labels)
    one_hot = (labels[:, None] == classes).double()
    wanted = (labels - labels.mean())[:, None] if is_values else one_hot
    ridge = PENALTY * len(x) * torch.eye(inside.shape[1], dtype=torch.double)
    found: Tensor = outside @ torch.linalg.solve(inside.T @ inside + ridge, inside.T @ wanted)
    return found[:, 0] if is_values else classes[_chosen(found)]


def _chosen(scores: Tensor) -> Tensor:
    """Return the class whose score is furthest above its mean: a rare one, too, is predicted."""
    return (scores - scores.mean(0)).argmax(1)


def skill(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return how much of labels is explained, and two standard errors where nothing is.

    It is the share of the errors of a constant prediction that are avoided, where all classes count
    alike; of numbers, the square of the correlation.
    """
    if labels.is_floating_point():
        correlation = torch.corrcoef(torch.stack([predicted.double(), labels]))[0, 1]
        return float(correlation.square().nan_to_num()), 4 / len(labels)
    classes, counts = torch.unique(labels, return_counts=True)
    chance, right = 1 / len(classes), (predicted == labels).double()
    recalled = fmean(float(right[labels == c].mean()) for c in classes)
    error = 2 * math.sqrt(chance * (1 - chance) * float((1 / counts).sum())) / len(classes)
    return (recalled - chance) / (1 - chance), error / (1 - chance)


def _own_share(fork: Fork, batches: Sequence[Any], enough: float) -> float:
    """Return what the model explains in evaluation mode; in training mode if that is more."""
    shares: list[float] = []
    for training in (False, True):
        if not shares or shares[0] < enough:
            fork.model.train(training)
            pairs = zip(*(_compared(fork, batch) for batch in batches), strict=True)
            scores, labels = map(torch.cat, pairs)
            shares.append(skill(_chosen(scores) if scores.ndim > 1 else scores, labels)[0])
    return max(shares)
