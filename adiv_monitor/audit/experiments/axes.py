"""Axes that are mistaken: attention along another axis, and reshapes that cut across axes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import PRODUCTS, Call, Derived, flat, given, see_calls
from adiv_monitor.audit.experiments.questions import looks
from adiv_monitor.audit.training.batches import first, size_of
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact

_EXACT = 1e-4  # deviation from 1 of sums of float32 numbers

Summed = tuple[Tensor, tuple[int, ...]]  # an operand, and the axes that a product sums it over


class Use(NamedTuple):
    """A product that sums weights, which a softmax made, over some axes.

    The weights have a shape, and sum to 1 along some axes.
    """

    softmax: Call
    product: Call
    shape: tuple[int, ...]
    sums_to_1: tuple[int, ...]
    over: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights sum to 1 along an axis that the product sums over."""
        return bool({*self.sums_to_1} & {*self.over})


@looks("attention-axis")
class Attentions:
    """Tells products that sum the weights of a softmax along another axis than they sum to 1.

    Scores are a product of two tensors that are no layer's weights, such as queries and keys. The
    logits of a layer may assign rows to clusters, whose members are summed on purpose. A softmax
    over an axis of length 1 counts for any logits. A product of two matrices of weights is again
    one, and does not count.
    """

    def __init__(self, fork: Fork) -> None:
        self.uses: list[Use] = []
        self._scores, self._weights = Derived(), Derived()

    def see(self, call: Call) -> None:
        """Look at a call."""
        self.uses += self._used(call)
        self._scores.follow(call)
        self._weights.follow(call)
        if call.name in PRODUCTS and call.name != "linear":
            self._scores.begin(call)
        if call.name == "softmax" and call.path is not None:
            x, axis = call.argument(0, "input"), call.argument(1, "dim")
            if isinstance(axis, int) and (self._scores.source(x) or x.shape[axis] == 1):
                self._weights.begin(call)

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the softmaxes whose weights a product sums over another axis."""
        return [Fact(use.softmax.place, {"sums": 1.0},
                     {"product": use.product.place, "shape": str(use.shape),
                      "axis": str(use.sums_to_1[0]), "over": str(use.over[0])})
                for use in self.uses if not use.fits]  # fmt: skip

    def _used(self, call: Call) -> Iterator[Use]:
        operands = self._summed(call)
        if all(self._weights.source(x) is None for x, _ in operands):
            return
        uses = [Use(self._weights.source(x) or call, call, tuple(x.shape), sums_to_1(x), over)
                for x, over in operands]  # fmt: skip
        for use in uses:
            others = any(other.fits for other in uses if other is not use)
            if use.softmax is not call and use.over and use.sums_to_1 and not others:
                yield use

    def _summed(self, call: Call) -> list[Summed]:
        """Return the operands of a product."""
        if call.name == "einsum":
            return _of_einsum(*call.args)
        operands = given(call)[:2] if call.name in PRODUCTS else []
        if len(operands) < 2 or call.name in ("linear", "baddbmm"):
            return []
        left, right = reversed(operands) if call.name == "__rmatmul__" else operands
        return [(left, (left.ndim - 1,)), (right, (max(right.ndim - 2, 0),))]


def _of_einsum(equation: object, *operands: Any) -> list[Summed]:
    if not isinstance(equation, str) or "->" not in equation:
        return []
    inputs, output = equation.replace(" ", "").split("->")
    found = []
    for letters, x in zip(inputs.split(","), flat(operands), strict=True):
        others = "." * (x.ndim - len(letters.replace("...", "")))  # the axes of an ellipsis
        each = enumerate(letters.replace("...", others))
        found.append((x, tuple(i for i, letter in each if letter not in output)))
    return found


def sums_to_1(x: Tensor) -> tuple[int, ...]:
    """Return the axes along which all sums of a tensor without negative entries are 1."""
    if not x.is_floating_point() or not x.numel() or not bool((x >= 0).all()):
        return ()
    exact = max(_EXACT, 4 * torch.finfo(x.dtype).eps)
    sums = [x.detach().double().sum(axis) - 1 for axis in range(x.ndim)]
    return tuple(axis for axis, far in enumerate(sums) if float(far.abs().max()) < exact)


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
        """Return the reshapes, and whether each has the axes of its input in another order."""
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
                sure = sorted(before) == sorted(after)
                words = {"of": str(before), "to": str(after)}
                facts.append(Fact(call.place, {"permutes": float(sure)}, words))
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
    """Return whether a permutation of axes, or of the heads that an axis holds, has that shape."""
    if len(before) > len(after):
        before, after = after, before
    if len(before) == 3 and len(after) == 4:  # (B, T, H·D) and (B, H, T, D)
        return before == (after[0], after[2], after[1] * after[3])
    return sorted(before) == sorted(after) and before != after
