"""Axes that are mistaken: attention along another axis, and reshapes that cut across axes."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from operator import mul

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import PRODUCTS, Call, Derived, given, see_calls
from adiv_monitor.audit.experiments.questions import Look, looks
from adiv_monitor.audit.training.batches import first, size_of
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact

_EXACT = 1e-4  # deviation from 1 of sums of float32 numbers

Summed = tuple[Tensor, set[int]]  # an operand, and the axes that a product sums it over


@looks("attention-axis")
class Attentions(Look):
    """Tells products that sum the weights of a softmax along another axis than they sum to 1.

    Scores are a product of two tensors that are no layer's weights, such as queries and keys. The
    logits of a layer may assign rows to clusters, whose members are summed on purpose.
    """

    def __init__(self, fork: Fork) -> None:
        super().__init__(fork)
        self._scores, self._weights = Derived(), Derived()

    def see(self, call: Call) -> None:
        """Look at a call."""
        for x, over in _summed(call):
            softmax = self._weights.source(x)
            axes = set() if softmax is None else sums_to_1(x)
            if softmax is not None and axes and not axes & over:
                words = {"product": call.place, "shape": str(tuple(x.shape)),
                         "axis": str(min(axes)), "over": str(min(over))}  # fmt: skip
                self._found.append(Fact(softmax.place, {}, words))
        self._scores.follow(call)
        self._weights.follow(call)
        if call.name in PRODUCTS and call.name != "linear":
            self._scores.begin(call)
        is_softmax = call.name == "softmax" and call.path is not None
        if is_softmax and self._scores.source(call.argument(0, "input")):
            self._weights.begin(call)


def _summed(call: Call) -> list[Summed]:
    """Return the operands of a product of two tensors."""
    operands = given(call)
    if call.name not in PRODUCTS or call.name in ("linear", "baddbmm") or len(operands) != 2:
        return []
    parts, output = ("ij", "jk"), "ik"
    if call.name == "einsum":
        inputs, _, output = call.args[0].replace(" ", "").replace("...", "").partition("->")
        parts = inputs.split(",")
    found = []
    for x, letters in zip(operands, parts, strict=True):
        axes = range(x.ndim - len(letters), x.ndim)
        over = {max(i, 0) for i, letter in zip(axes, letters, strict=True) if letter not in output}
        found.append((x, over))
    return found


def sums_to_1(x: Tensor) -> set[int]:
    """Return the axes along which all sums of a tensor without negative entries are 1."""
    if not x.is_floating_point() or not x.numel() or not bool((x >= 0).all()):
        return set()
    exact = max(_EXACT, 4 * torch.finfo(x.dtype).eps)
    sums = [x.detach().double().sum(axis) - 1 for axis in range(x.ndim)]
    return {axis for axis, far in enumerate(sums) if float(far.abs().max()) < exact}


# Reshapes that cut across the axes of their input, where a permutation is meant


FUNCTIONS = ("view", "reshape", "view_as", "reshape_as", "unflatten", "flatten")


@looks("reshape-scrambles")
class Scrambling:
    """Tells reshapes in which an axis of the result takes parts of several axes of the input.

    Also those across axes, however they fit, whose result has the shape of a permutation. Shifts,
    as of relative positions, are left out: reshapes of a padded tensor, and reshapes whose result
    loses one entry of an axis. So are those that a batch with one sample less lacks: their shapes
    fit by chance.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._crossing: dict[int, tuple[Call, Tensor]] = {}
        self._shifted: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the id

    def see(self, call: Call) -> None:
        """Look at a call."""
        x, made = call.args[0] if call.args else None, call.result
        if not isinstance(x, Tensor) or not isinstance(made, Tensor):
            return
        is_cut = call.name in FUNCTIONS and is_cut_across(x.shape, made.shape)
        if call.name == "pad":
            self._shifted[id(made)] = made
        elif call.name == "__getitem__" and id(x) in self._crossing and _loses_one(x, made):
            del self._crossing[id(x)]
            self._shifted[id(made)] = made
        elif is_cut and id(x) not in self._shifted:
            self._crossing[id(made)] = call, made

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the reshapes."""
        found, batch = self._found(), self._fork.batches[0]
        if not found or size_of(batch) < 3:
            return found
        fewer = Scrambling(self._fork)
        with suppress(Exception):  # the model may work with one batch size only
            see_calls(self._fork, fewer.see, first(batch, size_of(batch) - 1))
            return [fact for fact in found if fact.place in {x.place for x in fewer._found()}]
        return found

    def _found(self) -> Sequence[Fact]:
        facts = []
        for call, made in self._crossing.values():
            before, after = tuple(call.args[0].shape), tuple(made.shape)
            if takes_parts(before, after) or permutes(before, after):
                facts.append(Fact(call.place, {}, {"of": str(before), "to": str(after)}))
        return facts


def _loses_one(x: Tensor, part: Tensor) -> bool:
    """Return whether a call returns all of a tensor except one entry of one axis."""
    less = [a - b for a, b in zip(x.shape, part.shape, strict=False)]
    return x.ndim == part.ndim and sum(less) == 1 and min(less) == 0


def is_cut_across(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether, between two common splits, each shape has a split that the other lacks."""
    one, other = {*_cuts(before)}, {*_cuts(after)}
    return any(
        all(any(low < cut < high for cut in cuts) for cuts in (one, other))
        for low, high in pairwise(sorted({0} | one & other))
    )


def takes_parts(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether an axis of the result consists of proper parts of two axes, or fits none.

    Joining the heads of all samples is allowed, (B, H·D) → (B·H, D): a whole axis and a part.
    """
    one, other = _cuts(before), _cuts(after)
    if any(high % low for low, high in pairwise(sorted({*one, *other}))):
        return True
    return any(
        sum(max(a, low) < min(b, high) and not low <= a < b <= high for a, b in pairwise(one)) > 1
        for low, high in pairwise(other)
    )


def _cuts(shape: tuple[int, ...]) -> list[int]:
    """Return the products of the sizes from the left, without those of size 1."""
    return [1, *accumulate((size for size in shape if size > 1), mul)]


def permutes(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether a permutation of axes, or of the heads that an axis holds, has that shape.

    So it is where (B, C, …) becomes rows of C, as if they had been permuted to (B, …, C).
    """
    if len(before) > max(2, len(after)) and before[1] == after[-1] > 1:
        return True
    if len(before) > len(after):
        before, after = after, before
    if len(before) == 3 and len(after) == 4:  # (B, T, H·D) and (B, H, T, D)
        return before == (after[0], after[2], after[1] * after[3])
    return sorted(before) == sorted(after) and before != after
