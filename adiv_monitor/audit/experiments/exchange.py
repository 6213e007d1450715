"""On what does each output depend: on other samples, on the order, and on all parts of an input?"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import PRODUCTS, Call, calls_of, given, watched
from adiv_monitor.audit.experiments.changed_inputs import (
    SAMPLES,
    ChangedInputs,
    RepeatedLoss,
    given_inputs,
    of_few,
    outputs,
    still,
    with_tensor,
)
from adiv_monitor.audit.experiments.data import relates
from adiv_monitor.audit.experiments.questions import Untold, asks, of_each_call
from adiv_monitor.audit.training.batches import first, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.report.wording import listed

_SAME = 1e-5  # share of an output's rms: rounding
_BEYOND = 1.2  # factor on the share of one sample's entries
MOVED = 0.5  # of the outputs depend on the place in the batch
# Functions that add up rows at given indices, or with a matrix, as graph networks do.
BY_INDEX = ("index_add", "index_reduce", "scatter_add", "scatter_reduce")
BY_MATRIX = (*PRODUCTS, "addmm", "_sparse_mm", "_sparse_addmm")


def input_matters(fork: Fork, batch: Any) -> float:
    """Return how much a model's outputs change when inputs are exchanged between samples.

    ‖f(x) − f(x′)‖ / ‖f(x)‖, where x′ are the inputs of the model's forward pass moved on by one
    sample; labels, targets and masks stay. Both passes use the same random numbers.

    Returns:
        The ratio; 0: the model ignores its inputs. NaN if it is unknown: the model's forward pass
        does not run, all samples are alike, or come in a list, something is not finite, or no
        output has a part for each sample, as where the forward pass returns the loss itself.
    """
    try:
        run = ChangedInputs(fork, batch)
        pairs = zip(run.own, run.outputs(_next_sample), strict=True)
    except Exception:  # a forward pass may reject other samples' inputs
        return math.nan
    if all(torch.equal(x, _next_sample(x)) for x in run.inputs):
        return math.nan
    # Means over the samples are left out, since they do not depend on the order.
    size = size_of(run.inputs)
    parts = [pair for pair in pairs if pair[0].ndim and pair[0].numel() >= size]
    both = [(to_compute_dtype(x), to_compute_dtype(y)) for x, y in parts]
    difference = sum(float((x - y).square().sum()) for x, y in both)
    length = sum(float(x.square().sum()) for x, _ in both)
    return math.sqrt(difference / length) if 0 < length < math.inf else math.nan


def _next_sample(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def _first_other(x: Tensor) -> Tensor:
    """Give the first sample the values of the second."""
    return torch.cat([x[1:2], x[1:]])


def is_other(x: Tensor, y: Tensor) -> Tensor:
    """Return which entries differ by more than rounding."""
    rms = float(x.float().square().mean().sqrt())
    return (x - y).abs() > _SAME * max(rms, 1e-12)


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = [*zip(some, others, strict=True)]
    return all(x.shape == y.shape and not is_other(x, y).any() for x, y in pairs)


# Samples


@asks("samples-mixed")
def samples_mixed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of the other samples' outputs that change with the first sample's input.

    Batch normalisations and dropout are in evaluation mode. The evidence is the first function
    whose result changes beyond that sample. Nodes of a graph are meant to mix, and graphs are not.
    """
    if setup.differentiates:
        raise Untold("the loss computes inputs from gradients, which an exchange changes")
    if (graphs := _graphs(setup.batches[0])) is not None:
        return _graphs_mixed(setup, graphs)
    batch = of_few(setup).batches[0]
    size = size_of(batch)
    if size < 3 or any(len(x) != size for x in tensors(batch) if x.ndim):
        raise Untold("the batch has fewer than three samples, or tensors of unlike length")
    if any(relates(x) and x.shape == (size, size) for x in tensors(batch)):
        raise Untold("a matrix of the batch relates its rows, as the edges of a graph do")
    results: list[tuple[Call, Tensor]] = []
    fork = still(setup.fork())

    def see(call: Call) -> None:
        x = next(tensors(call.result), None)
        if call.path is not None and x is not None and x.shape[:1] == (size,) and x.numel():
            results.append((call, x.detach().clone()))

    run = ChangedInputs(replace(fork, loss=watched(fork.loss, see)), batch)
    before = results.copy()
    results.clear()
    if all(torch.equal(x, _first_other(x)) for x in run.inputs):
        raise Untold("the samples are alike, or come in a list")
    share = _share(run.own, run.outputs(_first_other), size)
    if share <= _BEYOND / size:
        return _by_place(setup, batch, run)
    mixing = [call for (call, x), (_, y) in zip(before, results, strict=False)
              if x.shape == y.shape and bool(is_other(x, y)[1:].any())]  # fmt: skip
    if mixing and _is_of_graph(mixing[0], size):
        raise Untold(f"the model adds up rows as graph networks do: {mixing[0].place}")
    if _may_lie_along_1(setup.fork(), batch):
        raise Untold("samples may lie along the second axis")
    place = mixing[0].place if mixing else ""
    return (Fact(place, {"share": share, "independent": 1 / size}),)


def _graphs(batch: Any) -> Tensor | None:
    """Return the number of each node's graph, of a batch of three packed graphs or more."""
    for x in tensors(batch):
        if x.ndim == 1 and not x.is_floating_point() and x.dtype != torch.bool:
            count = len(torch.unique(x))
            of_nodes = any(y.is_floating_point() and y.shape[:1] == x.shape for y in tensors(batch))
            is_packed = torch.equal(x, x.sort().values) and int(x[0]) == 0 and x[-1] == count - 1
            if of_nodes and is_packed and 2 < count < len(x):
                return x
    return None


def _graphs_mixed(setup: Setup, graphs: Tensor) -> Iterable[Fact]:
    def first_other(x: Tensor) -> Tensor:
        # Edges stay: a square matrix holds them.
        is_fixed = x.shape[1:] == x.shape[:1] or torch.equal(x, graphs)
        return x if is_fixed else torch.cat([x.flip(0)[graphs == 0], x[graphs > 0]])

    size = int(graphs[-1]) + 1
    run = ChangedInputs(still(setup.fork()), setup.batches[0])
    share = _share(run.own, run.outputs(first_other), size)
    fact = Fact("", {"share": share, "independent": 1 / size})
    return (fact,) if share > _BEYOND / size else ()


def _is_of_graph(call: Call, size: int) -> bool:
    """Return whether a call adds up rows at indices, or by a given matrix of all pairs of rows."""
    factors = given(call)[:-1] if call.name in BY_MATRIX else []
    by_matrix = any(x.shape == (size, size) and not x.requires_grad for x in factors)
    return call.name in BY_INDEX or by_matrix


@of_each_call("row-spread")
def summed(call: Call, fork: Fork) -> Fact | None:
    """Return how many rows a matrix of zeros and ones, such as an adjacency, sums into one.

    That is the most of any row, and of the median one. Means and normalised sums have other
    entries.
    """
    by = next(iter(given(call)), None) if call.name in BY_MATRIX and call.path is not None else None
    if by is None or by.requires_grad or by.ndim < 2 or by.shape[-1] != by.shape[-2]:
        return None
    sums = by.detach() @ torch.ones(by.shape[-1], 1, dtype=by.dtype, device=by.device)
    is_count = bool((by.detach().to_sparse().coalesce().values() == 1).all())
    numbers = {"most": float(sums.max()), "middle": float(sums.median())}
    return Fact(call.place, numbers) if is_count else None


def _share(own: list[Tensor], others: list[Tensor], size: int) -> float:
    """Return the share of the outputs with a part for each sample that change."""
    pairs = [(x, y) for x, y in zip(own, others, strict=True)
             if x.shape == y.shape and x.shape[:1] == (size,)]  # fmt: skip
    if not pairs or any(x.shape[1:2] == (size,) for x, _ in pairs):
        raise Untold("no output has a part for each sample, or one may be of pairs")
    return sum(int(is_other(x, y).sum()) for x, y in pairs) / sum(x.numel() for x, _ in pairs)


def _by_place(setup: Setup, batch: Any, run: ChangedInputs) -> Iterable[Fact]:
    """Return the share of the outputs that change if the batch is turned round, if any does."""
    turned = run.outputs(lambda x: x.flip(0), everything=True)
    share = _share(run.own, [x.flip(0) if x.ndim else x for x in turned], size_of(batch))
    if share <= MOVED:
        return ()
    drawn = ChangedInputs(replace(still(setup.fork()), seed=setup.seed + 1), batch)
    if not _are_alike(run.own, drawn.own):
        raise Untold("the model draws random numbers")
    return (Fact("", {"share": share}, {"by": "place"}),)


def _may_lie_along_1(fork: Fork, batch: Any) -> bool:
    """Return whether outputs follow inputs that trade places along axis 1 of all tensors.

    Where places differ, as with learnt positions, they are no samples.
    """
    lengths = {x.shape[1:2] for x in tensors(batch) if x.ndim}
    if len(lengths) > 1 or () in lengths:
        return False
    run = ChangedInputs(still(fork), batch)
    turned = run.outputs(lambda x: x.flip(1), everything=True)
    return _are_alike(run.own, [x.flip(1) if x.ndim > 1 else x for x in turned])


# Order


@asks("order-ignored")
def order_ignored(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the number of positions of the first input if their order changes no output.

    Outputs that are permuted in the same way, and depend on other positions too, count as
    unchanged. Positions are the second axis of tokens and of sequences, and the patches that the
    first layer cuts images into. Dropout is off. Position parameters that begin at zero are learnt,
    so the same must hold for the trained copy.
    """
    return _order_ignored(setup, setup.fork()) and _order_ignored(setup, setup.fork_like(trained))


def _order_ignored(setup: Setup, fork: Fork) -> Iterable[Fact]:
    batch, fork = first(setup.batches[0], SAMPLES), still(fork)
    patch = max(map(patch_of, calls_of(fork, patch_of, batch)[:1]), default=0)
    inputs = [*given_inputs(fork, batch).values()]
    count = places(inputs[0], patch) if inputs else 0
    if count < 3 or calls_of(fork, lambda call: call.name == "embedding_bag", batch):
        return ()
    run = ChangedInputs(fork, batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    order = order.to(run.inputs[0].device)

    def permuted(x: Tensor) -> Tensor:
        return _at_places(x, patch, lambda x: x[:, order])

    def first_place(x: Tensor) -> Tensor:
        return torch.cat([_next_sample(x[:, :1]), x[:, 1:]], 1)

    if torch.equal(run.inputs[0], permuted(run.inputs[0])):
        raise Untold("all positions are equal")
    own, others = run.own, run.outputs(permuted, 0)
    if not _are_alike(own, others):
        if any(x.shape[1:2] != (count,) for x in own):
            return ()
        one = run.outputs(lambda x: _at_places(x, patch, first_place), 0)
        # Of one place, they change no other if each place is computed by itself.
        by_itself = _are_alike([x[:, 1:] for x in own], [x[:, 1:] for x in one])
        if by_itself or not _are_alike([x[:, order] for x in own], others):
            return ()
    return (Fact("", {"places": float(count)}),) if own else ()


def patch_of(call: Call) -> int:
    """Return the size of the patches that a call cuts images into; 0 if it cuts none."""
    if call.name not in ("conv2d", "unfold") or (x := call.argument(0, "input")).ndim != 4:
        return 0
    if call.name == "conv2d":
        kernel, stride = call.argument(1, "weight").shape[2:], call.argument(3, "stride", 1)
    else:
        kernel, stride = call.argument(1, "kernel_size"), call.argument(4, "stride", 1)
    pair = nn.modules.utils._pair
    sizes = {*pair(kernel), *pair(stride)}
    size = int(min(sizes))
    fits = len(sizes) == 1 and not (x.shape[2] % size or x.shape[3] % size)
    return size if fits and size > 1 else 0


def places(x: Tensor, patch: int) -> int:
    """Return the number of positions of one sample; 0 if it is unknown."""
    if x.ndim == 4 and patch > 0:
        return (x.shape[2] // patch) * (x.shape[3] // patch)
    is_tokens = x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool
    return x.shape[1] if x.ndim == 3 or is_tokens else 0


def _at_places(x: Tensor, patch: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change an input (samples, positions, …), or an image as patches (samples, patches, …)."""
    if x.ndim != 4:
        return change(x)
    cut = change(functional.unfold(x, patch, stride=patch).transpose(1, 2)).transpose(1, 2)
    return functional.fold(cut, x.shape[2:], patch, stride=patch)


# Parts of inputs

PARTS = 16  # most parts of an axis
VARIES = 0.25  # share of the samples in which a part must differ from the next one's
# Names of an input's axes after the first, by their number.
_AXES = {2: ("features",), 3: ("places", "features"), 4: ("channels", "rows", "columns")}


class Part(NamedTuple):
    """A part of an input: some entries of one axis."""

    name: str
    axis: int
    entries: range

    def of(self, x: Tensor) -> Tensor:
        """Return a view of this part of an input, which may have fewer samples."""
        return x.narrow(self.axis, self.entries.start, min(len(self.entries), x.shape[self.axis]))

    def exchanged(self, x: Tensor, change: Callable[[Tensor], Tensor] = _next_sample) -> Tensor:
        """Return the input with this part of the next sample, or changed in another way."""
        changed = x.clone()
        self.of(changed).copy_(change(self.of(x)))
        return changed


@asks("input-partly-ignored")
def input_partly_ignored(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the parts whose exchange between samples changes no output, before and after training.

    Most parts change an output of two samples already. Parts that are equal in nearly all samples,
    such as padding, are left out, and so is an input that is ignored as a whole, unless another is
    not.
    """
    batch, fork = first(setup.batches[0], SAMPLES), still(setup.fork_like(trained))
    of_two, after = ChangedInputs(fork, first(batch, 2)), ChangedInputs(fork, batch)
    before = cache(lambda: ChangedInputs(still(setup.fork()), batch))

    def is_silent(i: int, part: Part) -> bool:
        """Return whether no output changes."""

        def is_same(run: ChangedInputs) -> bool:
            return bool(run.own) and all(map(torch.equal, run.own, run.outputs(part.exchanged, i)))

        return is_same(of_two) and is_same(after) and is_same(before())

    def fact(place: str, x: Tensor, share: float, **words: str) -> Fact:
        return Fact(place, {"share": share}, {"shape": str(tuple(x.shape)), **words})

    found, unused, inputs = [], [], [*zip(after.names, after.inputs, strict=True)]
    for number, (name, x) in enumerate(inputs):
        of = f"input {number}" if len(inputs) > 1 else "the input"
        parts = [part for part in _parts(x) if _varies(part.of(x))]
        silent = [part for part in parts if is_silent(number, part)]
        if len(silent) < len(parts):
            for axis, some in groupby(silent, key=lambda part: part.name):
                entries = listed([f"{i}" for part in some for i in part.entries])
                found.append(fact(f"{axis} {entries} of {of}", x, len(silent) / len(parts)))
        elif _varies(x) and is_silent(number, Part("", 0, range(len(x)))):
            unused.append(fact(f"input '{name}'", x, 1.0, whole="True"))
    return (*found, *unused) if len(unused) < sum(_varies(x) for _, x in inputs) else found


def _parts(x: Tensor) -> Iterator[Part]:
    is_tokens = x.ndim == 2 and not x.is_floating_point()
    for axis, name in enumerate(("places",) if is_tokens else _AXES.get(x.ndim, ()), start=1):
        # A convolution without padding may leave a border out: positions have larger parts.
        most = 4 if axis > 1 and (x.ndim > 3 or x.shape[axis] > PARTS) else PARTS
        length, count = x.shape[axis], min(x.shape[axis], most)
        edges = [i * length // count for i in range(count + 1)] if length > 1 else []
        yield from (Part(name, axis, range(*ends)) for ends in pairwise(edges))


def _varies(part: Tensor) -> bool:
    """Return whether the part differs between samples."""
    differs = (part != _next_sample(part)).reshape(len(part), -1).any(1)
    return len(part) > 1 and float(differs.float().mean()) >= VARIES


# The batch before, and parts of the batch

SAMPLES_OF = ("multinomial", "bernoulli", "normal")  # functions that draw from a distribution
NEAR = 0.75  # distance of neighbours in a series, over that of others


@asks("state-carried")
def state_carried(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how the outputs for a batch change with the first sample of the batch before.

    A state of each sample changes those of the sample at its place, and a queue, or running
    statistics, those of all.
    """
    before, size = setup.batches[0], size_of(setup.batches[0])
    batch = next((x for x in setup.batches if x is not before and size_of(x) == size > 2), None)
    if batch is None:
        raise Untold("no two batches are of the same length")

    fork = still(setup.fork())
    if all(map(torch.equal, *(outputs(fork, before) for _ in range(2)))):
        return ()  # outputs for a batch do not change when it is given again

    def outputs_after(before: Any) -> list[Tensor]:
        fork = still(setup.fork())
        outputs(fork, before)
        return [x for x in ChangedInputs(fork, batch).own if x.shape[:1] == (size,)]

    other = mapped(before, lambda x: _first_other(x) if x.shape[:1] == (size,) else x)
    pairs = zip(outputs_after(before), outputs_after(other), strict=True)
    moved = torch.stack([is_other(x, y).reshape(size, -1).any(1) for x, y in pairs]).any(0)
    if not moved.any():
        return ()
    by_sample = not moved[1:].any()
    words = {"of": "sample", "goes on": _goes_on(before, batch)} if by_sample else {"of": "batch"}
    return (Fact("", {"outputs": float(moved.float().mean())}, words),)


def _goes_on(before: Any, batch: Any) -> str:
    """Return whether series go on where those at the same places in the batch before ended.

    It is not known where neighbours in a series are no nearer than others.
    """
    for x, y in zip(tensors(batch), tensors(before), strict=True):
        if x.ndim > 1 and x.shape[1] > 1 and len(x) == len(y):
            if _are_near(y[:, -1], x[:, 0]):
                return "yes"
            return "no" if x.is_floating_point() and _are_near(x[:, -2], x[:, -1]) else "unknown"
    return "unknown"


def _are_near(x: Tensor, y: Tensor) -> bool:
    """Return whether rows are nearer to those at their place than to the next."""
    own, others = ((x.float() - z.float()).norm() for z in (y, _next_sample(y)))
    return float(own) < NEAR * float(others)


@asks("batch-part-unread")
def batch_part_unread(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the tensors that change no loss, of the shape of another that does; and flags.

    A flag is 0 or 1 for each sample, beside inputs and targets: a mask, or the ends of episodes.
    Also tensors of as many entries as the loss draws itself, such as actions, and columns of
    targets, of which others are read.
    """
    batch = setup.batches[0]
    parts, size = [*tensors(batch)], size_of(batch)
    floats = [i for i, x in enumerate(parts) if x.is_floating_point() and len(x) == size > 1]
    shapes = [parts[i].shape for i in floats if parts[i].ndim > 1]
    like = [i for i in floats if shapes.count(parts[i].shape) > 1]
    flags = [i for i, x in enumerate(parts) if len(parts) > 2 and len(x) == x.numel() == size > 1
             and set(x.flatten().tolist()) == {0, 1}]  # fmt: skip
    drawn = {call.result.numel(): call.place for call in calls_of(
        setup.fork(), lambda call: call.name in SAMPLES_OF and call.path is None)}  # fmt: skip
    loss = RepeatedLoss(setup.fork())
    own = loss.of(batch)

    def is_unread(i: int, *changes: Callable[[Tensor], Tensor]) -> bool:
        return all(loss.of(with_tensor(batch, i, change)) == own for change in changes)

    def fact(i: int) -> Fact:
        return Fact("", {"unread": float(i)}, {"shape": str(tuple(parts[i].shape))})

    yield from (fact(i) for i in flags if is_unread(i, lambda x: x.logical_not().to(x.dtype)))
    for i, x in enumerate(parts):
        if x.numel() in drawn and len(x) == size > 1 and is_unread(i, _next_sample):
            yield Fact("", {"unread": float(i)}, {"drawn": drawn[x.numel()]})
    inputs = [*given_inputs(setup.fork(), batch).values()]
    for i, x in ((i, parts[i]) for i in floats):
        if x.ndim == 2 and 1 < x.shape[1] <= PARTS and not any(torch.equal(x, y) for y in inputs):
            columns = [Part("", 1, range(j, j + 1)) for j in range(x.shape[1])]
            # Outputs that are all alike read the same of exchanged targets.
            silent = [f"{j}" for j, part in enumerate(columns) if _varies(part.of(x)) and is_unread(
                i, part.exchanged, partial(part.exchanged, change=torch.zeros_like))]  # fmt: skip
            if 0 < len(silent) < len(columns):
                yield Fact("", {"unread": float(i)}, {**fact(i).words, "columns": listed(silent)})
    unread = [i for i in like if is_unread(i, _next_sample, torch.zeros_like)]
    for i in unread:
        read = [j for j in like if j not in unread and parts[j].shape == parts[i].shape]
        if read and not any(torch.equal(parts[i], parts[j]) for j in read):
            yield fact(i)
