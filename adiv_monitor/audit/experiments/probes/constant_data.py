"""Do inputs, or the targets that count, differ between samples at all?"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import given_inputs
from adiv_monitor.audit.experiments.inputs import by_feature
from adiv_monitor.audit.experiments.probes.batches_drawn import labels_of
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCHES = 8  # most batches that are looked at
SAMPLES = 16  # fewest samples in them
# A feature that never varies is told only of inputs of at most MANY features, and if fewer than
# RARE of the other features' entries have its value: of pixels, counts and one-hot codes, some are
# often always zero.
MANY, RARE = 32, 0.01


@asks("constant-data")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report inputs, labels, or targets that the loss does not ignore, of one value only.

    If the inputs differ, those of several, and features of them, that do not are reported.
    """
    count = min(BATCHES, len(setup.batches))
    batches = [setup.batches[i * len(setup.batches) // count] for i in range(count)]
    if sum(map(size_of, batches)) < SAMPLES or size_of(batches[0]) < 2:
        raise Untold("too few samples")
    found = _inputs(setup, batches) or _targets(setup, batches) or _labels(setup)
    return tuple(found or _parts(setup, batches))


def _inputs(setup: Setup, batches: Sequence[Any]) -> list[Fact]:
    """Return a fact if no input of the model differs between any two samples."""
    fork = setup.fork()
    first: list[Tensor] = []
    for batch in batches:
        inputs = [x for x in given_inputs(fork, batch).values() if x.ndim > 1]
        first = first or inputs
        if not inputs or len(inputs) != len(first):
            return []
        for x, y in zip(first, inputs, strict=True):
            if y.shape[1:] != x.shape[1:] or not bool((y == x[:1]).all()):
                return []
    return [Fact("", {"samples": sum(map(size_of, batches))}, {"of": "inputs"})]


def _parts(setup: Setup, batches: Sequence[Any]) -> list[Fact]:
    """Return the inputs with one value in all entries, beside others, and features like that."""
    fork = setup.fork()
    given: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, x in given_inputs(fork, batch).items():
            given.setdefault(name, []).append(x)
    samples = float(sum(map(size_of, batches)))
    found = []
    for name, parts in given.items():
        if parts[0].dtype == torch.bool or parts[0].is_complex():
            continue
        features = _features(parts)
        low, high = features.aminmax(dim=0)
        still = low == high
        values = torch.unique(low[still])
        words = {"input": name, "type": "float" if parts[0].is_floating_point() else "integer"}
        if bool(still.all()) and len(values) == 1 and len(given) > 1:
            numbers = {"samples": samples, "value": float(values)}
            found.append(Fact("", numbers, {"of": "input", **words}))
        elif words["type"] == "float" and bool(still.any()) and 1 < len(still) <= MANY:
            others = features[:, ~still]
            rare = [v for v in values if float((others == v).double().mean()) < RARE]
            if others.numel() and rare:
                at = [i for i in still.nonzero().flatten().tolist() if low[i] in rare]
                listed = ", ".join(map(str, at))
                numbers = {"samples": samples, "features": len(still), "still": len(at)}
                found.append(Fact("", numbers, {"of": "features", "at": listed, **words}))
    return found


def _features(parts: Sequence[Tensor]) -> Tensor:
    """Return an input's entries (entries, features) in float64; one feature if lengths differ."""
    rows = [by_feature(part.cpu().double()) for part in parts]
    alike = len({x.shape[1] for x in rows}) == 1
    return torch.cat([x if alike else x.reshape(-1, 1) for x in rows])


def _labels(setup: Setup) -> list[Fact]:
    """Return a fact if all labels are the same, and the loss changes where they change."""
    found = [labels for labels in map(labels_of, setup.batches) if labels is not None]
    values = {value for labels in found for value in labels.tolist()}
    if len(found) < len(setup.batches) or len(values) != 1:
        return []
    (value,) = values
    if not _counts(setup, value):
        return []
    numbers = {"samples": sum(map(len, found)), "value": value}
    return [Fact("", numbers, {"of": "labels"})]


def _counts(setup: Setup, value: float) -> bool:
    """Return whether the first batch's loss changes with the labels of this value."""
    batch = setup.batches[0]
    loss = RepeatedLoss(setup.fork())
    inputs = next(tensors(batch))

    def other(x: Tensor) -> Tensor:
        is_label = x is not inputs and x.dtype != torch.bool and bool((x == value).all())
        return x + (-1 if value > 0 else 1) if is_label else x

    try:
        return loss.of(batch) != loss.of(mapped(batch, other))
    except (IndexError, RuntimeError):  # no such class: the loss looks at the labels
        return True


def _targets(setup: Setup, batches: Sequence[Any]) -> list[Fact]:
    """Return a fact if a loss of classes ignores all targets, or all that count are of one class.

    Targets that the loss makes itself, such as the place of the right pair, may all be the same.
    """
    fork = setup.fork()
    left: set[int] = set()  # targets of the batches that count
    made = []  # whether the loss made the targets of a call itself
    shares: list[float] = []
    index: list[int] = []

    def look(call: Call) -> None:
        target = call.argument(1, "target") if call.name in ("cross_entropy", "nll_loss") else None
        if isinstance(target, Tensor) and not target.is_floating_point() and target.numel():
            index.append(int(call.argument(4, "ignore_index", -100)))
            ignored = target == index[-1]
            shares.append(float(ignored.float().mean()))
            made.append(not any(_are_equal(x, target) for x in given))
            left.update(target[~ignored].tolist())

    with torch.no_grad():
        for batch in batches:
            given = list(tensors(batch))[1:]
            see_calls(fork, look, batch)
            if len(left) > 1 or (not shares and batch is batches[0]):
                break
    if any(share == 1 for share in shares):
        numbers = {"share": fmean(share == 1 for share in shares), "index": index[0]}
        return [Fact("", numbers, {"of": "ignored"})]
    if len(left) != 1 or any(made):
        return []
    numbers = {"share": fmean(shares), "index": index[0], "value": float(left.pop())}
    numbers["samples"] = sum(map(size_of, batches))
    return [Fact("", numbers, {"of": "rest" if min(shares) > 0 else "labels"})]


def _are_equal(x: Tensor, target: Tensor) -> bool:
    return x.numel() == target.numel() and bool((x.flatten() == target.flatten()).all())
