"""On what does each output depend: on other samples, on the order, and on all parts of an input?"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.concerned import few, with_tensor
from adiv_monitor.audit.experiments.derived import PRODUCTS
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, first, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact
from adiv_monitor.features.rows import to_compute_dtype

SAMPLES = 12  # most samples of a batch
_SAME = 1e-5  # share of an output's rms: rounding
_BEYOND = 1.2  # factor on the share of one sample's entries
MOVED = 0.5  # of the outputs depend on the place in the batch
# Modules with an argument for the axis of the samples.
ORDERED = (nn.RNNBase, nn.MultiheadAttention)
# Functions that add up rows at given indices, as graph networks do with the nodes of edges.
BY_INDEX = ("index_add", "index_reduce", "scatter_add", "scatter_reduce")
# Functions that add up rows with the weights of a matrix, which graph networks hold too.
BY_MATRIX = (*PRODUCTS, "addmm", "_sparse_mm", "_sparse_addmm")


def input_matters(fork: Fork, batches: Sequence[Any]) -> float:
    """Return how much a model's outputs change when inputs are exchanged between samples.

    ‖f(x) − f(x′)‖ / ‖f(x)‖ over these batches, where x′ are the inputs of the model's forward pass
    moved on by one sample; labels, targets and masks stay. Both passes use the same random numbers.

    Returns:
        The ratio; 0: the model ignores its inputs. NaN if it is unknown: the model's forward pass
        does not run, all samples are alike, or come in a list, something is not finite, or no
        output has a part for each sample, as where the forward pass returns the loss itself.
    """
    difference = length = 0.0
    try:
        for batch in batches:
            run = ChangedInputs(fork, batch, fewest=1)
            others = run.outputs(None, _next_sample)
            if all(torch.equal(x, _next_sample(x)) for x in run.inputs):
                continue
            for x, y in zip(run.own, others, strict=True):
                # Means over the samples are left out, since they do not depend on the order.
                if x.ndim and x.numel() >= size_of(run.inputs):
                    x, y = to_compute_dtype(x), to_compute_dtype(y)
                    difference += float((x - y).square().sum())
                    length += float(x.square().sum())
    except Exception:  # a forward pass may reject other samples' inputs
        return math.nan
    return math.sqrt(difference / length) if 0 < length < math.inf else math.nan


def _next_sample(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def is_other(x: Tensor, y: Tensor) -> Tensor:
    """Return which entries differ by more than rounding."""
    rms = float(x.float().square().mean().sqrt())
    return (x - y).abs() > _SAME * max(rms, 1e-12)


def _are_alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and not bool(is_other(x, y).any())


# Samples


@asks("samples-mixed")
def samples_mixed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of the other samples' outputs that change with the first sample's input.

    Batch normalisations and dropout are in evaluation mode. The evidence is the first function
    whose result changes beyond that sample.
    """
    if setup.differentiates:
        raise Untold("the loss computes inputs from gradients, which an exchange changes")
    graphs = _graphs(setup.batches[0])
    if graphs is not None:
        packed = _mixed(setup.fork(), setup.batches[0], int(graphs[-1]) + 1, graphs)
        return () if packed is None else (packed,)
    batch = few(setup, setup.batches[0])
    size = size_of(batch)
    if size < 3:
        raise Untold("the batch has fewer than three samples")
    shapes = [x.shape for x in tensors(batch) if x.ndim]
    if any(shape[0] != size for shape in shapes):
        raise Untold("the tensors of a batch are of unlike length: which axis holds the "
                     "samples is not known")  # fmt: skip
    fact = _mixed(setup.fork(), batch, size)
    if fact is None:
        return _by_place(setup, batch)
    if _is_independent_along_1(setup.fork(), batch):
        raise Untold("samples may lie along the second axis: along it they do not mix")
    is_ordered = any(isinstance(m, ORDERED) and not m.batch_first for m in setup.model.modules())
    return (replace(fact, words={"batch_first": "False"} if is_ordered else {}),)


def _graphs(batch: Any) -> Tensor | None:
    """Return the number of each node's graph, of a batch of three packed graphs or more."""
    for x in tensors(batch):
        if x.ndim == 1 and len(x) > 1 and not x.is_floating_point() and x.dtype != torch.bool:
            steps = x.diff()
            of_nodes = any(y.is_floating_point() and y.shape[:1] == x.shape for y in tensors(batch))
            is_packed = x[0] == 0 and steps.min() >= 0 and steps.max() == 1 and x[-1] > 1
            if of_nodes and is_packed and int(x[-1]) + 1 < len(x):
                return x
    return None


def _mixed(fork: Fork, batch: Any, size: int, graphs: Tensor | None = None) -> Fact | None:
    """Return a fact if outputs of other samples change with the input of the first.

    Args:
        fork: A copy.
        batch: The batch.
        size: The number of samples.
        graphs: The number of each node's graph, if samples are graphs; None: they are rows.
    """
    calls: list[_Result] = []
    length = size if graphs is None else len(graphs)
    run = ChangedInputs(still(fork), batch, 1, length, partial(_note, calls, size))

    def first_other(x: Tensor) -> Tensor:
        if graphs is None:
            return torch.cat([x[1:2], x[1:]])
        # Edges stay: a square matrix holds them.
        is_fixed = x.shape[1:] == x.shape[:1] or torch.equal(x, graphs)
        return x if is_fixed else torch.cat([x.flip(0)[graphs == 0], x[graphs > 0]])

    own, before = run.own, calls.copy()
    if not run.inputs:
        raise Untold("no input has a part for each sample; of a list of tensors it is not known")
    if all(torch.equal(x, first_other(x)) for x in run.inputs):
        raise Untold("the samples are alike")
    calls.clear()
    others = run.outputs(None, first_other)
    fitting = [(x, y) for x, y in zip(own, others, strict=False)
               if x.ndim and x.shape == y.shape and len(x) == size]  # fmt: skip
    if not fitting or len(own) != len(others):
        raise Untold("no output has a part for each sample")
    if any(x.ndim > 1 and x.shape[1] == size for x, _ in fitting):
        raise Untold("an output has as many columns as samples: it may be of pairs")
    changed = sum(int(is_other(x, y).sum()) for x, y in fitting)
    share = changed / sum(x.numel() for x, _ in fitting)
    place = _first_mixing(before, calls, size)
    is_mixed = share > _BEYOND / size
    return Fact(place, {"share": share, "independent": 1 / size}) if is_mixed else None


class _Result(NamedTuple):
    """The result of a call, and the weights by which it adds up samples, unless it learns them."""

    name: str
    place: str
    result: Tensor
    graph: Tensor | None


def _note(calls: list[_Result], size: int, call: Call) -> None:
    x = call.result[0] if isinstance(call.result, tuple) else call.result
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
        return
    if x.ndim and len(x) == size and x.numel() and call.path is not None:
        factors = list(tensors(call.args))[:-1] if call.name in BY_MATRIX else []
        graph = next((g for g in factors if g.shape == (size, size)), None)
        is_given = graph is not None and not graph.requires_grad
        calls.append(
            _Result(call.name, call.place, x.detach().clone(), graph if is_given else None)
        )


def _first_mixing(own: list[_Result], others: list[_Result], size: int) -> str:
    """Return the place of the first call whose result changes beyond the first sample."""
    for one, other in zip(own, others, strict=False):
        if one.name != other.name or one.result.shape != other.result.shape:
            break
        changes = is_other(one.result, other.result)
        if one.name in BY_INDEX and bool(changes[1:].any()):
            raise Untold("the model adds up rows at given indices, as graph networks do")
        if one.graph is not None and other.graph is not None and bool(changes[1:].any()):
            mine, its = one.graph.to_dense(), other.graph.to_dense()
            if torch.equal(mine[1:], its[1:]):  # the row of the sample itself may change
                raise Untold("the model mixes samples by a matrix that does not depend on them, "
                             "as of a graph")  # fmt: skip
        if changes.float().mean() > _BEYOND / size:
            return one.place
    return ""


def _by_place(setup: Setup, batch: Any) -> Iterable[Fact]:
    """Return the share of the outputs that change if the batch is turned round, if any does.

    Where the model draws random numbers, one for each place, this can't be told.
    """
    run = ChangedInputs(still(setup.fork()), batch, fewest=1)
    turned = run.outputs(None, lambda x: x.flip(0), everything=True)
    drawn = ChangedInputs(replace(still(setup.fork()), seed=setup.seed + 1), batch).own
    size = size_of(batch)
    outputs = [(x, y.flip(0), z) for x, y, z in zip(run.own, turned, drawn, strict=True)
               if x.ndim and len(x) == size]  # fmt: skip
    if any(bool(is_other(x, z).any()) for x, _, z in outputs):
        raise Untold("the model draws random numbers")
    changed = sum(int(is_other(x, y).sum()) for x, y, _ in outputs)
    share = changed / max(1, sum(x.numel() for x, *_ in outputs))
    return (Fact("", {"share": share}, {"by": "place"}),) if share > MOVED else ()


def _is_independent_along_1(fork: Fork, batch: Any) -> bool:
    """Return whether samples may lie along axis 1 of all tensors without mixing there.

    Then outputs follow inputs that trade places along it. Where places differ, as with learnt
    positions, they are no samples.
    """
    shapes = [x.shape for x in tensors(batch) if x.ndim]
    if any(len(shape) < 2 or shape[1] != shapes[0][1] for shape in shapes):
        return False
    run = ChangedInputs(still(fork), batch)
    others = run.outputs(None, lambda x: torch.cat([x[:, 1:2], x[:, 1:]], 1))
    turned = run.outputs(None, lambda x: x.flip(1), everything=True)
    found = [(x, y, z) for x, y, z in zip(run.own, others, turned, strict=False)
             if x.shape == y.shape == z.shape and x.shape[1:2] == shapes[0][1:2]]  # fmt: skip
    return bool(found) and all(
        float(is_other(x, y).float().mean()) <= _BEYOND / x.shape[1] and _are_alike(x, z.flip(1))
        for x, y, z in found
    )


# Order

BAGS = -1  # instead of a patch size: inputs are summed on purpose
PATCHES = ("conv2d", "unfold")  # functions whose stride may equal their kernel size


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
    patch = patch_size(fork, batch)
    run = ChangedInputs(fork, batch)
    if not run.inputs:
        raise Untold("no input tensor has a part for each sample")
    count = places(run.inputs[0], patch)
    if count < 3 or patch == BAGS:
        return ()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    order = order.to(run.inputs[0].device)

    def permuted(x: Tensor) -> Tensor:
        return _at_places(x, patch, lambda x: x[:, order])

    if torch.equal(run.inputs[0], permuted(run.inputs[0])):
        raise Untold("all positions are equal")
    own, other = run.own, run.outputs(0, permuted)
    if not own or len(own) != len(other):
        raise Untold("the model returns no tensor")
    if not all(map(_are_alike, own, other)):
        if any(a.shape[1:2] != (count,) or not _are_alike(a[:, order], b)
               for a, b in zip(own, other, strict=True)):  # fmt: skip
            return ()
        one = run.outputs(0, lambda x: _at_places(
            x, patch, lambda x: torch.cat([_next_sample(x[:, :1]), x[:, 1:]], 1)))  # fmt: skip
        if all(_are_alike(a[:, 1:], b[:, 1:]) for a, b in zip(own, one, strict=True)):
            return ()  # each position is computed independently
    return (Fact("", {"places": float(count)}),)


def patch_size(fork: Fork, batch: Any) -> int:
    """Return the patch size of the first layer that cuts images; 0: none; BAGS: bags are summed."""
    found: list[int] = []

    def look(call: Call) -> None:
        if call.name == "embedding_bag":
            found.append(BAGS)
        if not found and call.name in PATCHES and (size := patch_of(call)):
            found.append(size)

    with torch.no_grad():
        see_calls(fork, look, batch)
    return found[0] if found else 0


def patch_of(call: Call) -> int:
    """Return the size of the patches that a call cuts images into; 0 if it cuts none."""
    x = call.argument(0, "input")
    if not isinstance(x, Tensor) or x.ndim != 4:
        return 0
    if call.name == "unfold":
        kernel, stride = call.argument(1, "kernel_size"), call.argument(4, "stride", 1)
    else:
        kernel = tuple(call.argument(1, "weight").shape[2:])
        stride = call.argument(3, "stride", 1)
    sizes = {n for s in (kernel, stride) for n in (s if isinstance(s, (tuple, list)) else (s,))}
    size = int(next(iter(sizes)))
    fits = not (x.shape[2] % size or x.shape[3] % size)
    return size if len(sizes) == 1 and size > 1 and fits else 0


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
GRID = 4  # number of parts along each side of images
VARIES = 0.25  # share of the samples in which a part must differ from the next one's
_AXES = {2: ("features",), 3: ("places", "features"), 4: ("channels",)}
# Functions with a boolean mask → position and name of that argument.
MASKS = {
    "masked_fill": (1, "mask"),
    "scaled_dot_product_attention": (3, "attn_mask"),
    "multi_head_attention_forward": (14, "key_padding_mask"),
}


class Part(NamedTuple):
    """A part of an input that is exchanged at once.

    Attributes:
        name: name of its axis, or of the patch.
        along: entries along the axis; None: a patch.
        entries: entries of the whole input.
    """

    name: str
    along: slice | None
    entries: tuple[slice, ...]


_WHOLE = Part("", None, (slice(None),))


@asks("input-partly-ignored")
def input_partly_ignored(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the parts whose exchange between samples changes no output, before and after training.

    Parts that are equal in nearly all samples, such as padding, are left out, and so is an input
    that is ignored as a whole, unless another is not.
    """
    batch = first(setup.batches[0], SAMPLES)
    runs = [ChangedInputs(still(fork), batch, fewest=1)
            for fork in (setup.fork_like(trained), setup.fork())]  # fmt: skip

    def is_silent(number: int, part: Part) -> bool:
        return all(_is_silent(run, number, part) for run in runs)

    names, inputs = runs[0].names, runs[0].inputs.copy()
    varied = [number for number, x in enumerate(inputs) if _varies(x)]
    masks = {"masked": "True"} if _is_masked(setup.fork(), batch) else {}
    found, ignored = [], []
    for number, x in enumerate(inputs):
        shape = {"shape": str(tuple(x.shape))}
        parts = [part for part in _parts(x) if _varies(x[part.entries])]
        silent = [part for part in parts if is_silent(number, part)]
        if len(silent) < len(parts):
            numbers = {"share": len(silent) / len(parts), "parts": float(len(silent))}
            of = f"input {number}" if len(inputs) > 1 else "the input"
            found += [Fact(f"{words} of {of}", numbers, {**shape, **masks})
                      for words in _joined(silent)]  # fmt: skip
        elif number in varied and len(varied) > 1 and is_silent(number, _WHOLE):
            ignored.append(Fact(f"input '{names[number]}'", {"share": 1.0, "parts": 1.0},
                                {**shape, "whole": "True"}))  # fmt: skip
    return (*found, *ignored) if len(ignored) < len(varied) else found


def _parts(x: Tensor) -> Iterator[Part]:
    names = _AXES.get(x.ndim, ())
    if x.ndim == 2 and not x.is_floating_point():
        names = ("places",)
    whole = slice(None)
    for axis, name in enumerate(names, start=1):
        for some in _ranges(x.shape[axis], PARTS):
            yield Part(name, some, (*[whole] * axis, some))
    if x.ndim == 4:
        for rows in _ranges(x.shape[2], GRID):
            for columns in _ranges(x.shape[3], GRID):
                name = f"rows {_said(rows)}, columns {_said(columns)}"
                yield Part(name, None, (whole, whole, rows, columns))


def _ranges(length: int, most: int) -> list[slice]:
    """Return the parts of an axis; none for an axis of one entry."""
    count = min(length, most)
    edges = [i * length // count for i in range(count + 1)] if length > 1 else []
    return [slice(a, b) for a, b in pairwise(edges)]


def _said(some: slice) -> str:
    last = some.stop - 1
    return f"{some.start}" if last == some.start else f"{some.start} to {last}"


def _joined(parts: list[Part]) -> list[str]:
    """Return words for the parts, with neighbours along an axis joined."""
    joined: list[tuple[str, slice | None]] = []
    for name, along, _ in parts:
        last, before = joined[-1] if joined else ("", None)
        if along and before and (last, before.stop) == (name, along.start):
            joined[-1] = name, slice(before.start, along.stop)
        else:
            joined.append((name, along))
    return [name if along is None else f"{name} {_said(along)}" for name, along in joined]


def _varies(part: Tensor) -> bool:
    """Return whether the part differs between samples."""
    differs = (part != _next_sample(part)).reshape(len(part), -1).any(1)
    return len(part) > 1 and float(differs.float().mean()) >= VARIES


def _is_silent(run: ChangedInputs, number: int, part: Part) -> bool:
    def exchanged(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[part.entries] = _next_sample(x[part.entries])
        return changed

    own, other = run.own, run.outputs(number, exchanged)
    return bool(own) and len(own) == len(other) and all(map(torch.equal, own, other))


def _is_masked(fork: Fork, batch: Any) -> bool:
    """Return whether a call receives a boolean mask."""
    found: list[bool] = []
    with torch.no_grad():
        see_calls(fork, lambda call: found.append(mask_of(call) is not None), batch)
    return any(found)


def mask_of(call: Call) -> tuple[int, str, Tensor] | None:
    """Return the boolean mask that a call receives, with its position and name."""
    place, name = MASKS.get(call.name, (0, ""))
    mask = call.argument(place, name) if name else None
    return (place, name, mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None


# The batch before, and parts of the batch

NEAR = 0.75  # distance of neighbours in a series, over that of others


@asks("state-carried")
def state_carried(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return how the outputs for a batch change with the first sample of the batch before.

    A state of each sample changes those of the sample at its place, and a queue, or running
    statistics, those of all.
    """
    before, *others = list({id(batch): batch for batch in setup.batches}.values())
    size = size_of(before)
    batch = next((other for other in others if size_of(other) == size > 2), None)
    if batch is None:
        raise Untold("no two batches are of the same length")

    def outputs_after(before: Any) -> list[Tensor]:
        fork = still(setup.fork())
        with seeded(setup.seed), torch.no_grad():
            fork.loss(fork.model, copied(before))
        return [x for x in ChangedInputs(fork, batch).own if x.ndim and len(x) == size]

    def first_other(x: Tensor) -> Tensor:
        return torch.cat([x[1:2], x[1:]]) if x.ndim and len(x) == size else x

    pairs = zip(outputs_after(before), outputs_after(mapped(before, first_other)), strict=True)
    moved = [is_other(x, y).flatten(1).any(1) if x.ndim > 1 else is_other(x, y) for x, y in pairs]
    if not any(bool(rows.any()) for rows in moved):
        return ()
    by_sample = not any(bool(rows[1:].any()) for rows in moved)
    words = {"of": "sample", "goes on": _goes_on(before, batch)} if by_sample else {"of": "batch"}
    return (Fact("", {"outputs": max(float(rows.float().mean()) for rows in moved)}, words),)


def _goes_on(before: Any, batch: Any) -> str:
    """Return whether series go on where those at the same places in the batch before ended.

    It is not known where neighbours in a series are no nearer than others.
    """
    x = next((x for x in tensors(batch) if x.ndim > 1 and x.shape[1] > 1), None)
    if x is None:
        return "unknown"
    ends = [y[:, -1] for y in tensors(before)
            if y.ndim > 1 and len(y) == len(x) and y.shape[2:] == x.shape[2:]]  # fmt: skip
    if any(_are_near(end, x[:, 0]) for end in ends):
        return "yes"
    return "no" if x.is_floating_point() and _are_near(x[:, -2], x[:, -1]) else "unknown"


def _are_near(x: Tensor, y: Tensor) -> bool:
    """Return whether rows are nearer to those at their place than to the next."""
    own, others = ((x.float() - z.float()).norm() for z in (y, _next_sample(y)))
    return float(own) < NEAR * float(others)


@asks("batch-part-unread")
def batch_part_unread(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the tensors that change no loss, of the shape of another that does."""
    batch = setup.batches[0]
    parts, size = list(tensors(batch)), size_of(batch)
    shapes = [x.shape for x in parts if x.is_floating_point() and x.ndim > 1]
    like = [i for i, x in enumerate(parts) if x.is_floating_point() and len(x) == size > 1
            and shapes.count(x.shape) > 1]  # fmt: skip
    loss = RepeatedLoss(setup.fork())
    own = loss.of(batch) if like else 0.0
    unread = [i for i in like if all(loss.of(with_tensor(batch, i, change)) == own
                                     for change in (_next_sample, lambda x: 0.5 * x))]  # fmt: skip
    read = [i for i in like if i not in unread]
    for i in unread:
        twin = next((j for j in read if parts[j].shape == parts[i].shape), None)
        if twin is not None and not any(torch.equal(parts[i], parts[j]) for j in read):
            numbers = {"unread": float(i), "read": float(twin)}
            yield Fact("", numbers, {"shape": str(tuple(parts[i].shape))})
