"""Does a small network predict the labels of unseen samples, and does the model?"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import calls_of
from adiv_monitor.audit.experiments.changed_inputs import given_inputs
from adiv_monitor.audit.experiments.loss_inputs import parts_like
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

EVERY = 4  # one of so many batches is held out
BATCHES = 8  # fewest different batches
SAMPLES = 100  # fewest samples that are held out
SOME = 32  # samples after which a model that explains as much as the small network is told
EXPLAINS = 0.3  # of the labels: what a small network must explain
MOST_SAMPLES, MOST_FEATURES, HIDDEN = 2048, 512, 256
PENALTY = 0.1  # times the number of samples
LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss"),
)
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
    y = _labels(fork, given)
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
        "model": _own_share(setup.fork_like(trained), given[EVERY - 1 :: EVERY], found),
        "per class": math.inf if is_values else len(labels) / len(set(labels.tolist())),
        "held out": float(len(others)),
    }
    return (Fact("", numbers),)


def _labels(fork: Fork, batches: Sequence[Any]) -> list[Tensor]:
    """Return the labels of each batch: the tensor that a loss gets with the first."""
    _, labels = _compared(fork, batches[0])
    found = parts_like(labels, batches)
    if not found:
        raise Untold(_UNKNOWN)
    return [x.detach().flatten().cpu().to(labels.dtype) for x in found]


def _inputs(fork: Fork, batch: Any, labels: Tensor) -> Tensor:
    """Return the features of a batch's inputs (samples, features)."""
    given = [x for x in given_inputs(fork, batch).values() if not parts_like(labels, [x])]
    if not given:
        raise Untold("the model is not called with a part of the batch")
    return torch.cat([_features(x.cpu()) for x in given], 1)


@torch.no_grad()
def _compared(fork: Fork, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what the first loss of one label for each sample gets: predicted and true labels.

    They are integers if the labels are classes, and in float64 if they are values.
    """
    size = size_of(batch)
    for call in calls_of(fork, lambda call: call.name in LOSSES, batch):
        given, target = (x.detach().cpu() for x in call.args[:2])
        if target.numel() != size:
            continue
        if given.ndim == 2 and len(given) == size and not target.is_floating_point():
            return given.argmax(1), target.flatten().long()
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

    Its last layer is fitted by least squares, with a penalty.
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
    is_values, classes = labels.is_floating_point(), torch.unique(labels)
    one_hot = (labels[:, None] == classes).double()
    wanted = (labels - labels.mean())[:, None] if is_values else one_hot
    ridge = PENALTY * len(x) * torch.eye(inside.shape[1], dtype=torch.double)
    found: Tensor = outside @ torch.linalg.solve(inside.T @ inside + ridge, inside.T @ wanted)
    return found[:, 0] if is_values else classes[found.argmax(1)]


def skill(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return how much of labels is explained, and two standard errors where nothing is.

    It is the share of the errors of a constant prediction that are avoided; of numbers, the square
    of the correlation.
    """
    if labels.is_floating_point():
        correlation = torch.corrcoef(torch.stack([predicted.double(), labels]))[0, 1]
        return float(correlation.square().nan_to_num()), 4 / len(labels)
    most = max(Counter(labels.tolist()).values()) / len(labels)
    right = float((predicted == labels).double().mean())
    error = 2 * math.sqrt(most * (1 - most) / len(labels))
    return (right - most) / (1 - most), error / (1 - most)


def _own_share(fork: Fork, batches: Sequence[Any], enough: float) -> float:
    """Return what the model explains in evaluation or in training mode, whichever is more.

    No more batches run once it explains enough of some.
    """
    shares = []
    for training in (False, True):
        fork.model.train(training)
        pairs = []
        for batch in batches:
            pairs.append(_compared(fork, batch))
            predicted, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            share = skill(predicted, labels)[0] if len(set(labels.tolist())) > 1 else -math.inf
            if share >= enough and len(labels) >= SOME:
                return share
        shares.append(share)
    return max(shares)
