"""What batches hold: do they differ, and their samples, inputs and labels, and do these fit?"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import calls_of, is_input
from adiv_monitor.audit.experiments.changed_inputs import arguments, given_inputs
from adiv_monitor.audit.experiments.loss_inputs import CLASSIFIES, LOSSES, parts_like
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, InputStatistics

BATCHES = 8  # most batches whose inputs are looked at


def spread(batches: Sequence[Any], most: int = BATCHES) -> list[Any]:
    """Return some batches, evenly spread over all of them."""
    count = min(most, len(batches))
    return [batches[i * len(batches) // count] for i in range(count)]


def inputs_of(fork: Fork, batches: Iterable[Any]) -> dict[str, list[Tensor]]:
    """Return the model's inputs for each batch, by argument."""
    given: dict[str, list[Tensor]] = defaultdict(list)
    for batch in batches:
        for name, x in given_inputs(fork, batch).items():
            given[name].append(x.cpu())
    return given


def features(parts: Sequence[Tensor]) -> Tensor:
    """Return an input's entries (entries, features) in float64; one feature if lengths differ.

    Features are the channels, dim 1, of four or more dimensions, and the last dimension otherwise;
    a vector is of one feature.
    """
    rows = [x.double().movedim(1, -1) if x.ndim >= 4 else x.double() for x in parts]
    rows = [x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1) for x in rows]
    alike = len({x.shape[1] for x in rows}) == 1
    return torch.cat([x if alike else x.reshape(-1, 1) for x in rows])


def labels_of(batches: Sequence[Any]) -> list[Tensor]:
    """Return the last tensor with one number for each sample, flat; []: some batch has none."""
    found = []
    for batch in batches:
        size = size_of(batch)
        each = [x for x in tensors(batch) if x.ndim < 3 and x.numel() == size > 1 == x[0].numel()]
        if not each:
            return []
        found.append(each[-1].detach().flatten().double().cpu())
    return found


# Statistics of inputs


def input_statistics(fork: Fork) -> dict[str, InputStatistics] | None:
    """Return statistics of the model's floating-point inputs in some batches, by argument.

    Of several tensors in an argument, each has a number. Matrices that relate samples, such as
    adjacencies, are left out. None: the loss does not call the model.
    """
    given: dict[str, list[Tensor]] = defaultdict(list)
    for batch in spread(fork.batches):
        if not (called := arguments(fork, batch)):
            return None
        for name, value in called.items():
            found = [x for x in tensors(value) if x.is_floating_point() and x.ndim and x.numel()
                     and not (len(called) > 1 and relates(x))]  # fmt: skip
            for number, x in enumerate(found if is_input(name) else ()):
                key = name if len(found) == 1 else f"{name}.{number}"
                given[key].append(x.detach().to_dense().cpu())
    return {name: _statistics(parts) for name, parts in given.items()}


def relates(x: Tensor) -> bool:
    """Return whether this may be a matrix of the relations between rows, such as an adjacency."""
    return x.ndim == 2 and len(x) == x.shape[1] and bool((x.to_dense() >= 0).all())


def _statistics(parts: Sequence[Tensor]) -> InputStatistics:
    """Return the statistics of an input, from that of each batch (N, …)."""
    x = features(parts)
    low, high = x.aminmax(dim=0)
    means, stds = x.mean(0), x.std(0, correction=0)
    varying = stds[low != high]
    lengths = torch.cat([part.double().reshape(len(part), -1).square().sum(1) for part in parts])
    return InputStatistics(
        mean=float(x.mean()), std=float(x.std(correction=0)), features=len(means),
        minimum=float(low.min()), maximum=float(high.max()),
        feature_mean_spread=float(means.std(correction=0)),
        feature_std_ratio=float(varying.max() / varying.median()) if len(varying) else math.nan,
        length_cv=float(lengths.std(correction=0) / lengths.mean()))  # fmt: skip


# Batches

FEW, SEVERAL = 2, 3  # at most FEW different batches, of more than SEVERAL
LEAST = 4  # fewest batches with labels
SHUFFLES = 50
# At most this share of a batch's samples differ, where a sample has at least ENTRIES entries, or
# values between whole numbers: samples of a few whole numbers may be equal by chance.
REPEATED, ENTRIES = 0.5, 8
LOOKED_AT, FEWEST = 4, 4  # batches in which samples are compared, and fewest samples of each


@asks("same-batch")
def same_batch(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how many batches, or samples of a batch, differ in content.

    A batch that is given again counts once, unless no other is given.
    """
    given = list({id(batch): batch for batch in setup.batches}.values())
    if len(given) == 1 and len(setup.batches) > SEVERAL:
        return (Fact("", {"different": 1, "batches": len(setup.batches)}, {"of": "one"}),)
    different: set[Any] = set()
    for batch in given if len(given) > SEVERAL else ():
        different.add(tuple((x.shape, _content(x)) for x in tensors(batch)))
        if len(different) > FEW:
            break
    if 0 < len(different) <= FEW:
        numbers = {"different": len(different), "batches": len(given)}
        return (Fact("", numbers, {"of": "batches"}),)
    share = max(map(_differing, given[:LOOKED_AT]))
    return (Fact("", {"share": share}, {"of": "samples"}),) if share <= REPEATED else ()


def _differing(batch: Any) -> float:
    """Return the share of a batch's samples that differ, labels included; 1 if it tells nothing."""
    size = size_of(batch)
    parts = [x for x in tensors(batch) if x.ndim and len(x) == size]
    # Of ones and zeros, as of states that are one-hot, eight tell as much as another number.
    entries = sum(x[0].numel() / (8 if bool(((x == 0) | (x == 1)).all()) else 1) for x in parts)
    has_fractions = any(x.is_floating_point() and not torch.equal(x, x.round()) for x in parts)
    if size < FEWEST or not (entries >= ENTRIES or has_fractions):
        return 1.0
    return len({b"".join(map(_content, row)) for row in zip(*parts, strict=True)}) / size


def _content(x: Tensor) -> bytes:
    """Return the bytes of a tensor's entries."""
    return bytes(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


@asks("unshuffled")
def unshuffled(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the labels' variance within batches over that of batches drawn from all labels.

    Also return by how many standard deviations of such draws it is below their mean.
    """
    found = labels_of(setup.batches)
    if len(found) < LEAST:
        raise Untold("no label for each sample, or too few batches")
    every, sizes = torch.cat(found), list(map(len, found))
    chance = torch.Generator().manual_seed(setup.seed)

    def within(labels: Tensor) -> float:
        return fmean(float(x.var(correction=0)) for x in torch.split(labels, sizes))

    draws = (every[torch.randperm(len(every), generator=chance)] for _ in range(SHUFFLES))
    drawn = torch.tensor([within(labels) for labels in draws], dtype=torch.float64)
    own, mean, spread = within(every), float(drawn.mean()), float(drawn.std())
    if not mean > 0 or not spread > 0:
        return ()
    return (Fact("", {"ratio": own / mean, "z": (own - mean) / spread}),)


# Inputs and labels of one value

SAMPLES = 16  # fewest samples in the batches that are looked at


@asks("constant-data")
def constant_data(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report inputs, labels, or targets that the loss does not ignore, of one value only."""
    batches = spread(setup.batches)
    samples = sum(map(size_of, batches))
    if samples < SAMPLES or size_of(batches[0]) < 2:
        raise Untold("too few samples")
    given = inputs_of(setup.fork(), batches)
    wide = [parts for parts in given.values() if parts[0].ndim > 1]
    if wide and all(map(_are_constant, wide)):
        return (Fact("", {"samples": float(samples)}, {"of": "inputs"}),)
    return _targets(setup)


def _are_constant(parts: Sequence[Tensor]) -> bool:
    one = parts[0][:1]
    return all(x.shape[1:] == one.shape[1:] and bool((x == one).all()) for x in parts)


@torch.no_grad()
def _targets(setup: Setup) -> list[Fact]:
    """Return a fact if a loss ignores all targets, or all that count are the same.

    Targets that the loss makes itself, such as the place of the right pair, may all be the same;
    and so may values, such as those at a boundary, beside those of another call.
    """
    compared = calls_of(setup.fork(), lambda call: call.name in (*CLASSIFIES, *LOSSES))
    for call in [x for x in compared if x.name in CLASSIFIES or len(compared) == 1]:
        target, index = call.argument(1, "target"), call.kwargs.get("ignore_index", -100)
        given = parts_like(target, setup.batches)
        left = {value for x in given for value in torch.unique(x[x != index])[:2].tolist()}
        shares = [float((x == index).double().mean()) for x in given or [target]]
        is_lost = max(shares) == 1 and call.kwargs.get("reduction") == "mean"
        if min(shares) == 1 or is_lost:
            numbers = {"share": fmean(share == 1 for share in shares), "index": index}
            return [Fact("", numbers, {"of": "ignored"})]
        if len(left) == 1:
            numbers = {"share": fmean(shares), "index": index, "value": float(left.pop()),
                       "samples": float(sum(map(size_of, setup.batches)))}  # fmt: skip
            return [Fact("", numbers, {"of": "rest" if min(shares) > 0 else "labels"})]
    return []


# Is the target among the inputs?

COPIED = 1e-9  # share of the target's variance that rounding leaves to a copy


@asks("target-leak")
def target_leak(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the entries of inputs that are the target of all samples, up to factor and offset."""
    batches = spread(setup.batches)
    y = torch.cat(labels_of(batches) or [torch.zeros(0)]).double()
    for name, parts in inputs_of(setup.fork(), batches).items():
        is_rows = 1 < parts[0].ndim < 4 and parts[0].is_floating_point()  # or sequences; no images
        x = features([part.flatten(1) for part in parts]) if is_rows else y[:, None]
        if not len(x) == len(y) >= SAMPLES or x.shape[1] < 2:
            continue
        apart, own = ((z - z.mean(0)) / z.std(0) for z in (x, y))
        shares = (own @ apart / (len(y) - 1)).square().nan_to_num(0.0)
        if float(shares.max()) > 1 - COPIED:
            yield Fact(f"input '{name}'", {"entry": int(shares.argmax()), "samples": len(y)})
