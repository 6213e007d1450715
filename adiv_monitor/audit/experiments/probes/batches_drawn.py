"""Do batches, and their samples, differ from each other, and are their labels mixed?"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FEW, SEVERAL = 2, 3  # at most FEW different batches, of more than SEVERAL
LEAST = 4  # fewest batches with labels
SHUFFLES = 50
# At most this share of a batch's samples differ, where a sample has at least ENTRIES entries, or
# values between whole numbers: samples of a few whole numbers may be equal by chance.
REPEATED, ENTRIES = 0.5, 8
LOOKED_AT, SAMPLES = 4, 4  # batches in which samples are compared, and fewest samples of each


@asks("same-batch")
def same_batch(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how many batches, or samples of a batch, differ in content.

    A batch that is given again counts once, unless no other is given.
    """
    given = list({id(batch): batch for batch in setup.batches}.values())
    if len(given) == 1 and len(setup.batches) > SEVERAL:
        numbers = {"different": 1, "batches": len(setup.batches)}
        return (Fact("", numbers, {"of": "one"}),)
    different: list[list[Tensor]] = []
    for batch in given if len(given) > SEVERAL else ():
        content = list(tensors(batch))
        if not any(_are_equal(content, other) for other in different):
            different.append(content)
        if len(different) > FEW:
            break
    if not different or len(different) > FEW:
        return _repeated(given)
    if not different[0]:
        raise Untold("batches hold no tensors")
    numbers = {"different": len(different), "batches": len(given)}
    return (Fact("", numbers, {"of": "batches"}),)


def _repeated(batches: list[Any]) -> tuple[Fact, ...]:
    """Return a fact if in each of some batches most samples equal another one, labels included."""
    shares = []
    for batch in batches[:LOOKED_AT]:
        size = size_of(batch)
        parts = [x for x in tensors(batch) if x.ndim and len(x) == size]
        entries = sum(x[0].numel() for x in parts) if size else 0
        if size < SAMPLES or not (entries >= ENTRIES or any(map(_has_fractions, parts))):
            return ()
        samples = {b"".join(map(_content, row)) for row in zip(*parts, strict=True)}
        shares.append(len(samples) / size)
    if max(shares, default=1.0) > REPEATED:
        return ()
    return (Fact("", {"share": max(shares)}, {"of": "samples"}),)


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() and not torch.equal(x, x.round())


def _content(x: Tensor) -> bytes:
    """Return the bytes of a tensor's entries."""
    return bytes(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in zip(some, others, strict=True)
    )


@asks("unshuffled")
def unshuffled(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the labels' variance within batches over that of batches drawn from all labels.

    Also return by how many standard deviations of such draws it is below their mean.
    """
    found = [labels for labels in map(labels_of, setup.batches) if labels is not None]
    if len(found) < max(LEAST, len(setup.batches)):
        raise Untold("no label for each sample, or too few batches")
    sizes = [len(labels) for labels in found]
    every = torch.cat(found)
    own = _within(every, sizes)
    chance = torch.Generator().manual_seed(setup.seed)
    drawn = torch.tensor(
        [_within(every[torch.randperm(len(every), generator=chance)], sizes)
         for _ in range(SHUFFLES)], dtype=torch.float64
    )  # fmt: skip
    mean, spread = float(drawn.mean()), float(drawn.std())
    if not mean > 0 or not spread > 0:
        return ()
    return (Fact("", {"ratio": own / mean, "z": (own - mean) / spread}),)


def labels_of(batch: Any) -> Tensor | None:
    """Return the last tensor of a batch with one number for each sample."""
    found = one_number_each(batch)
    return as_labels(found[-1]) if found else None


def one_number_each(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch with one number for each sample."""
    size = size_of(batch)
    return [x for x in tensors(batch) if x.ndim in (1, 2) and x.numel() == len(x) == size > 1]


def as_labels(x: Tensor) -> Tensor:
    """Return a flat copy of labels in float64."""
    return x.detach().flatten().double().cpu()


def _within(labels: Tensor, sizes: list[int]) -> float:
    """Return the mean over batches of the labels' variance."""
    parts = [float(x.var(correction=0)) for x in torch.split(labels, sizes)]
    return math.fsum(parts) / len(parts)
