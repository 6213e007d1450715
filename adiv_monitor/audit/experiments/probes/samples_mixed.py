"""Do the predictions for one sample change with another sample, or with its place in the batch?"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import still
from adiv_monitor.audit.experiments.concerned import few
from adiv_monitor.audit.experiments.derived import PRODUCTS
from adiv_monitor.audit.experiments.inputs import changed, is_input, is_list
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

_BEYOND = 1.2  # factor on the share of one sample's entries
_SAME = 1e-5  # share of an output's length: rounding
MOVED = 0.5  # of the outputs depend on the place in the batch
Change = Callable[[Tensor, int], Tensor]
# Modules with an argument for the axis of the samples.
ORDERED = (nn.RNNBase, nn.MultiheadAttention)
# Functions that add up rows at given indices, as graph networks do with the nodes of edges.
BY_INDEX = ("index_add", "index_reduce", "scatter_add", "scatter_reduce")
# Functions that add up rows with the weights of a matrix, which graph networks hold too.
BY_MATRIX = (*PRODUCTS, "addmm", "_sparse_mm", "_sparse_addmm")


@asks("samples-mixed")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of the other samples' outputs that change with the first sample's input.

    Batch normalisations and dropout are in evaluation mode. The evidence is the first function
    whose result changes beyond that sample.
    """
    if setup.differentiates:
        raise Untold("the loss computes inputs from gradients, which an exchange changes")
    batch = few(setup, setup.batches[0])
    size = size_of(batch)
    if size < 3:
        raise Untold("the batch has fewer than three samples")
    shapes = [x.shape for x in tensors(batch) if x.ndim]
    if any(shape[0] != size for shape in shapes):
        raise Untold("the tensors of a batch are of unlike length: which axis holds the "
                      "samples is not known")  # fmt: skip
    own, others = (_passed(setup.fork(), batch, exchange) for exchange in (None, 0))
    told = _shares(own, others, size)
    if isinstance(told, str):
        raise Untold(told)
    share, place = told
    if share <= _BEYOND / size:
        return _by_place(setup, batch)
    if _is_independent_along_1(setup, batch):
        raise Untold("samples may lie along the second axis: along it they do not mix")
    numbers = {"share": share, "independent": 1 / size}
    is_ordered = any(isinstance(m, ORDERED) and not m.batch_first for m in setup.model.modules())
    words = {"batch_first": "False"} if is_ordered else {}
    return (Fact(place, numbers, words),)


def _by_place(setup: Setup, batch: Any) -> Iterable[Fact]:
    """Return the share of the outputs that change if the batch is turned round, if any does.

    Where the model draws random numbers, one for each place, this can't be told.
    """
    own, turned, drawn = (
        _passed(fork, batch, change)
        for fork, change in (
            (setup.fork(), None),
            (setup.fork(), _turned),
            (replace(setup.fork(), seed=setup.seed + 1), None),
        )
    )
    alike = zip(own.outputs, turned.outputs, drawn.outputs, strict=True)
    size = size_of(batch)
    outputs = [(x, y.flip(0), z) for x, y, z in alike if len(x) == size]
    if any(bool(_is_other(x, z).any()) for x, _, z in outputs):
        raise Untold("the model draws random numbers")
    changed = sum(int(_is_other(x, y).sum()) for x, y, _ in outputs)
    share = changed / max(1, sum(x.numel() for x, *_ in outputs))
    return (Fact("", {"share": share}, {"by": "place"}),) if share > MOVED else ()


def _turned(x: Tensor, size: int) -> Tensor:
    return x.flip(0) if x.ndim and len(x) == size else x


def _turned_along_1(x: Tensor, size: int) -> Tensor:
    return x.flip(1) if x.ndim > 1 and len(x) == size else x


class _Pass:
    """The results of one forward pass: the model's outputs, and the results of all calls."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls: list[tuple[str, str, Tensor, Tensor | None]] = []
        self.exchanged = False
        self.of_lists = False


def _passed(fork: Fork, batch: Any, exchange: int | Change | None, axis: int = 0) -> _Pass:
    """Return one forward pass, optionally with changed arguments.

    Args:
        fork: a copy.
        batch: the batch.
        exchange: the sample that gets the next sample's inputs; or what happens to each argument
            with a part for each sample, inputs and masks alike; None: nothing changes.
        axis: axis of the samples.
    """
    seen = _Pass()
    size = size_of(batch)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if exchange is None:
            return None
        if not isinstance(exchange, int):
            turn = exchange
            return changed(module, args, kwargs, lambda name, x: mapped(x, lambda y: turn(y, size)))

        def other(x: Tensor) -> Tensor:
            if x.ndim <= axis or (axis == 0 and len(x) != size) or not _is_dense(x):
                return x
            new = x.clone()
            new.select(axis, exchange).copy_(x.select(axis, (exchange + 1) % x.shape[axis]))
            seen.exchanged |= not torch.equal(x, new)
            return new

        def exchanged(name: str, x: Any) -> Any:
            seen.of_lists |= is_input(name) and is_list(x)
            return mapped(x, other) if is_input(name) else x

        return changed(module, args, kwargs, exchanged)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        found = [x.detach() for x in tensors(output) if x.is_floating_point() and x.ndim]
        seen.outputs += [x.clone() for x in found]

    def look(call: Call) -> None:
        x = call.result[0] if isinstance(call.result, tuple) else call.result
        is_float = isinstance(x, Tensor) and x.is_floating_point() and _is_dense(x)
        if is_float and x.ndim and call.path is not None:
            seen.calls.append((call.name, call.place, x.detach().clone(), _graph(call, size)))

    fork.model.register_forward_pre_hook(before, with_kwargs=True)
    fork.model.register_forward_hook(after)
    with torch.no_grad():
        see_calls(still(fork), look, batch)
    return seen


def _shares(own: _Pass, others: _Pass, size: int) -> tuple[float, str] | str:
    """Return the share of output entries that change, and the first place, or why it is unknown."""
    if others.of_lists:
        return "an input is a list of tensors: the audit does not know whether they are the samples"
    if not others.exchanged:
        return "the samples are alike"
    fitting = [(x, y) for x, y in zip(own.outputs, others.outputs, strict=False)
               if x.shape == y.shape and len(x) == size]  # fmt: skip
    if not fitting or len(own.outputs) != len(others.outputs):
        return "no output has a part for each sample"
    if any(x.ndim > 1 and x.shape[1] == size for x, _ in fitting):
        return "an output has as many columns as samples: it may be of pairs"
    changed = sum(int(_is_other(x, y).sum()) for x, y in fitting)
    share = changed / sum(x.numel() for x, _ in fitting)
    place = ""
    for (name, where, x, mine), (other, _, y, its) in zip(own.calls, others.calls, strict=False):
        if name != other or x.shape != y.shape:
            break
        if len(x) != size or not x.numel():
            continue
        changes = _is_other(x, y)
        if name in BY_INDEX and bool(changes[1:].any()):
            return "the model adds up rows at given indices, as graph networks do"
        if mine is not None and its is not None and changes[1:].any() and _is_fixed(mine, its):
            return "the model mixes samples by a matrix that does not depend on them, as of a graph"
        if changes.float().mean() > _BEYOND / size:
            place = where
            break
    return share, place


def _graph(call: Call, size: int) -> Tensor | None:
    """Return the weights by which a product adds up samples; None: it does not, or learns them."""
    factors = list(tensors(call.args))[:-1] if call.name in BY_MATRIX else []
    graph = next((x for x in factors if x.shape == (size, size)), None)
    return None if graph is None or graph.requires_grad else graph.detach()


def _is_fixed(x: Tensor, y: Tensor) -> bool:
    """Return whether two graphs are equal but for the row of the exchanged sample."""
    if _is_dense(x):
        return torch.equal(x[1:], y[1:])
    x, y = (z.to_sparse(layout=torch.sparse_coo).coalesce() for z in (x, y))
    return torch.equal(x.indices(), y.indices()) and torch.equal(x.values(), y.values())


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided


def _is_other(x: Tensor, y: Tensor) -> Tensor:
    """Return which entries differ by more than rounding."""
    rms = float(x.float().square().mean().sqrt())
    return (x - y).abs() > _SAME * max(rms, 1e-12)


def _is_independent_along_1(setup: Setup, batch: Any) -> bool:
    """Return whether samples may lie along axis 1 of all tensors without mixing there.

    Then outputs follow inputs that trade places along it. Where places differ, as with learnt
    positions, they are no samples.
    """
    shapes = [x.shape for x in tensors(batch) if x.ndim]
    if any(len(shape) < 2 or shape[1] != shapes[0][1] for shape in shapes):
        return False
    own, others, turned = (
        _passed(setup.fork(), batch, change, axis=1) for change in (None, 0, _turned_along_1)
    )
    alike = zip(own.outputs, others.outputs, turned.outputs, strict=False)
    found = [(x, y, z) for x, y, z in alike
             if x.shape == y.shape == z.shape and x.ndim > 1
             and x.shape[1] == shapes[0][1]]  # fmt: skip
    return bool(found) and all(
        float(_is_other(x, y).float().mean()) <= _BEYOND / x.shape[1]
        and not bool(_is_other(x, z.flip(1)).any())
        for x, y, z in found
    )
