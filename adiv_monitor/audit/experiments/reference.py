"""Does a small network predict the labels of unseen samples, and does the model?"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import given_inputs
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

EVERY = 4  # one of so many batches is held out
BATCHES = 8  # fewest different batches
SAMPLES = 100  # fewest samples that are held out
EXPLAINS = 0.3  # of the labels: what a small network must explain
MOST_SAMPLES, MOST_FEATURES, HIDDEN = 2048, 512, 256
PENALTIES = (1e-2, 1e-1, 1.0)  # times the number of samples
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss"),
)
_UNKNOWN = "no known loss of one label for each sample is called with a part of the batch"


class Skill(NamedTuple):
    """How much of the labels predictions explain.

    Attributes:
        share: of the errors of a constant prediction, those that are avoided; of numbers, the
            square of the correlation.
        error: two standard errors of that share where nothing is explained.
    """

    share: float
    error: float


@asks("behind-reference")
def behind_reference(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the skills of a small network on unseen samples, and of the model on the same.

    The model is not asked where the network explains something, but less than `EXPLAINS`.
    """
    given = list({id(batch): batch for batch in setup.batches}.values())
    if len(given) < BATCHES:
        raise Untold(f"{len(given)} different batches: too few to hold some out")
    fork = setup.fork()
    y = _labels(fork, given)
    x = [_inputs(fork, *pair) for pair in zip(given, y, strict=True)]
    unseen = slice(EVERY - 1, None, EVERY)
    kept = [i for i in range(len(given)) if i % EVERY != EVERY - 1]
    seen = torch.cat([x[i] for i in kept])[:MOST_SAMPLES]
    labels, others = torch.cat([y[i] for i in kept])[:MOST_SAMPLES], torch.cat(y[unseen])
    if len(others) < SAMPLES:
        raise Untold(f"fewer than {SAMPLES} samples to hold out")
    if not bool(seen.isfinite().all()) or min(len(set(z.tolist())) for z in (labels, others)) < 2:
        raise Untold("inputs that are not finite, or labels that are all alike")
    predictions = _predictions(seen, labels, torch.cat(x[unseen]), setup.seed)
    found = max(skill(predicted, others) for predicted in predictions)
    if found.error < found.share < EXPLAINS:
        return ()
    is_values = labels.is_floating_point()
    numbers = {
        "reference": found.share,
        "error": found.error,
        "model": _own_share(setup.fork_like(trained), given[unseen]),
        "per class": math.inf if is_values else len(labels) / len(set(labels.tolist())),
        "held out": float(len(others)),
    }
    return (Fact("", numbers),)


def _labels(fork: Fork, batches: Sequence[Any]) -> list[Tensor]:
    """Return the labels of each batch: the tensor that a loss gets with the first."""
    _, labels = _compared(fork, batches[0])
    at = [i for i, x in enumerate(tensors(batches[0])) if _are_equal(x, labels)]
    if not at:
        raise Untold(_UNKNOWN)
    return [list(tensors(b))[at[0]].detach().flatten().cpu().to(labels.dtype) for b in batches]


def _are_equal(x: Tensor, labels: Tensor) -> bool:
    is_like = x.ndim > 0 and x.numel() == len(x) == len(labels)
    return is_like and torch.equal(x.flatten().double().cpu(), labels.double())


def _inputs(fork: Fork, batch: Any, labels: Tensor) -> Tensor:
    """Return the features of a batch's inputs (samples, features)."""
    given = [x for x in given_inputs(fork, batch).values() if not _are_equal(x, labels)]
    if not given:
        raise Untold("the model is not called with a part of the batch")
    return torch.cat([_features(x.cpu()) for x in given], 1)


def _compared(fork: Fork, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what the first loss of one label for each sample gets: predicted and true labels.

    They are integers if the labels are classes, and in float64 if they are values.
    """
    size = size_of(batch)
    found: list[tuple[Tensor, Tensor]] = []

    def look(call: Call) -> None:
        given, target = call.argument(0, "input"), call.argument(1, "target")
        is_loss = call.name in LOSSES and isinstance(given, Tensor) and isinstance(target, Tensor)
        if is_loss and target.numel() == size:
            given, target = given.detach().cpu(), target.detach().cpu().flatten()
            if given.ndim == 2 and len(given) == size and not target.is_floating_point():
                found.append((given.argmax(1), target.long()))
            elif given.numel() == size:
                found.append((given.flatten().double(), target.double()))

    with torch.no_grad():
        see_calls(fork, look, batch)
    if not found:
        raise Untold(_UNKNOWN)
    return found[0]


def _features(x: Tensor) -> Tensor:
    """Return samples' entries, averaged over neighbours if there are many; counts of words."""
    if not x.is_floating_point():
        words = x.reshape(len(x), -1).long() % MOST_FEATURES
        return torch.zeros(len(x), MOST_FEATURES).scatter_add_(1, words, torch.ones(words.shape))
    x = x.float()
    if x.ndim >= 4 and x[0].numel() > MOST_FEATURES:
        side = max(1, math.isqrt(MOST_FEATURES // x.shape[1]))
        x = functional.adaptive_avg_pool2d(x.flatten(3), side)
    x = x.reshape(len(x), 1, -1)
    return functional.adaptive_avg_pool1d(x, min(MOST_FEATURES, x.shape[2]))[:, 0]


def _predictions(x: Tensor, labels: Tensor, unseen: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield what a network predicts, with several penalties.

    Its hidden layer is drawn, and its last layer is fitted by least squares.
    """
    mean, std = x.mean(0), x.std(0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    with seeded(seed):
        weight = torch.randn(x.shape[1], HIDDEN) / math.sqrt(x.shape[1])
        bias = torch.randn(HIDDEN)
    inside, outside = (
        torch.cat([torch.ones(len(z), 1), z, torch.tanh(z @ weight + bias)], 1).double()
        for z in ((x - mean) / std, (unseen - mean) / std)
    )
    is_values = labels.is_floating_point()
    classes = labels.unique()
    one_hot = (labels[:, None] == classes).double()
    wanted = (labels - labels.mean())[:, None] if is_values else one_hot
    square, products = inside.T @ inside, inside.T @ wanted
    for penalty in PENALTIES:
        ridge = penalty * len(x) * torch.eye(len(square), dtype=square.dtype)
        found = outside @ torch.linalg.solve(square + ridge, products)
        yield found[:, 0] if is_values else classes[found.argmax(1)]


def skill(predicted: Tensor, labels: Tensor) -> Skill:
    """Return how much is explained of labels that are not all alike."""
    if labels.is_floating_point():
        both = torch.stack([predicted.double(), labels])
        correlation = float(torch.corrcoef(both)[0, 1])
        return Skill(correlation**2 if math.isfinite(correlation) else 0.0, 4 / len(labels))
    most = max(Counter(labels.tolist()).values()) / len(labels)
    right = float((predicted == labels).double().mean())
    error = 2 * math.sqrt(most * (1 - most) / len(labels))
    return Skill((right - most) / (1 - most), error / (1 - most))


def _own_share(fork: Fork, batches: Sequence[Any]) -> float:
    """Return what the model explains in evaluation or in training mode, whichever is more."""
    shares = []
    for training in (False, True):
        fork.model.train(training)
        pairs = [_compared(fork, batch) for batch in batches]
        predicted, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        shares.append(skill(predicted, labels).share)
    return max(shares)
