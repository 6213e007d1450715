"""Is there a class none of whose samples has a gradient?"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.data import as_labels, one_number_each
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

BATCHES = 8  # most batches
SAMPLES = 8  # fewest samples of the class
CLASSES = 64  # most classes
MOST = 0.5  # share of the samples of the other classes that have a gradient, at least


@asks("class-untaught")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return classes of which no sample has a gradient at the outputs, before and after training.

    Of the samples of other classes, more than half have one before training.
    """
    after = setup.fork_like(trained)
    labels: list[Tensor] = []
    taught: list[Tensor] = []
    count = min(BATCHES, len(setup.batches))
    for fork in (setup.fork(), after):
        for i in range(count):
            batch = setup.batches[i * len(setup.batches) // count]
            found = _labels(fork, batch)
            if found is None or not bool((found == found.round()).all()):
                raise Untold("no class for each sample")
            has_gradient = _has_gradient(fork, batch)
            if has_gradient is None:
                raise Untold("no output has a part for each sample")
            labels.append(found)
            taught.append(has_gradient)
            if not _without_gradient(torch.cat(labels), torch.cat(taught)):
                return ()
    every = torch.cat(labels[:count])
    counts = _untaught(torch.cat(labels), torch.cat(taught), first=len(every))
    return tuple(
        Fact("", {"class": value, "samples": n / 2, "of": float(len(every))})
        for value, n in counts.items()
    )  # fmt: skip


def _labels(fork: Fork, batch: Any) -> Tensor | None:
    """Return the last tensor with one number for each sample that is no weight.

    Without its weights, a loss is zero, or the ratio of two zeros.
    """
    found = one_number_each(batch)
    if len(found) < 2:
        return as_labels(found[-1]) if found else None
    loss = RepeatedLoss(fork)
    for x in reversed(found):
        value = loss.of(mapped(batch, partial(_without, x)))
        if not (value == 0 or math.isnan(value)):
            return as_labels(x)
    return None


def _without(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(y) if y is x else y


def _classes(labels: Tensor) -> list[float]:
    """Return the classes; negative labels mark what is left out, and are none."""
    return [c for c in torch.unique(labels).tolist() if c >= 0]


def _without_gradient(labels: Tensor, taught: Tensor) -> list[float]:
    """Return the classes of which no sample has a gradient."""
    return [c for c in _classes(labels) if not bool(taught[labels == c].any())]


def _untaught(labels: Tensor, taught: Tensor, first: int) -> dict[float, int]:
    """Return these classes with their numbers of samples, if the other classes have gradients.

    These count for the `first` samples, before training, because what is learnt needs no gradient.
    """
    classes, still = _classes(labels), _without_gradient(labels, taught)
    others = torch.tensor([c not in still and c >= 0 for c in labels.tolist()])
    known = taught[:first][others[:first]]
    is_taught = len(known) > 0 and float(known.float().mean()) > MOST
    if not 1 < len(classes) <= CLASSES or not is_taught:
        return {}
    counts = {c: int((labels == c).sum()) for c in still}
    return {c: n for c, n in counts.items() if n >= 2 * SAMPLES}


def _has_gradient(fork: Fork, batch: Any) -> Tensor | None:
    """Return which samples have a gradient at the model's outputs; None: not known."""
    size = size_of(batch)
    made: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        for x in tensors(output):
            if x.requires_grad and x.ndim and len(x) == size:
                x.retain_grad()
                made.append(x)

    with fork.model.register_forward_hook(note), seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(batch)).backward()  # type: ignore[no-untyped-call]
    fork.optimizer.zero_grad()
    known = [x.grad.reshape(size, -1).ne(0).any(1).cpu() for x in made if x.grad is not None]
    return torch.stack(known).any(0) if known else None
