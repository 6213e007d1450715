"""Reshapes that cut across the axes of their input, where a permutation is meant."""

from collections.abc import Iterable
from itertools import pairwise, permutations
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks, first_at_each_place
from adiv_monitor.audit.training.batches import first, size_of
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FUNCTIONS = ("view", "reshape", "view_as", "reshape_as", "unflatten", "flatten")


@asks("reshape-scrambles")
def scrambling(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return reshapes in which an axis of the result takes parts of several axes of the input.

    Also return those across axes, however they fit, whose result has the shape of a permutation.
    Those that are found with all samples only, and not with one less, are left out: their shapes
    fit by chance.
    """
    batch, size = setup.batches[0], size_of(setup.batches[0])
    found = _scrambled(setup.fork(), batch)
    if found and size > 2:
        try:
            others = {fact.place for fact in _scrambled(setup.fork(), first(batch, size - 1))}
        except Exception:  # the model works with one batch size only
            return found
        return [fact for fact in found if fact.place in others]
    return found


def _scrambled(fork: Fork, batch: Any) -> tuple[Fact, ...]:
    """Return the reshapes of a batch that cut across the axes of their input.

    Shifts, as of relative positions, are left out: reshapes of a padded tensor, and reshapes whose
    result loses one entry of an axis.
    """
    crossing: dict[int, tuple[Call, Tensor]] = {}
    shifted: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the same id

    def look(call: Call) -> None:
        x, made = call.args[0] if call.args else None, call.result
        if not isinstance(x, Tensor) or not isinstance(made, Tensor):
            return
        if call.name == "pad":
            shifted[id(made)] = made
        elif call.name == "__getitem__" and id(x) in crossing and _loses_one(x, made):
            del crossing[id(x)]
            shifted[id(made)] = made
        elif scrambles(call) and id(x) not in shifted:
            crossing[id(made)] = call, made

    with torch.no_grad():
        see_calls(fork, look, batch)
    facts = []
    for call, made in crossing.values():
        x = call.args[0]
        if takes_parts(x.shape, made.shape) or permuted(x, tuple(made.shape)) is not None:
            words = {"of": str(tuple(x.shape)), "to": str(tuple(made.shape))}
            sure = sorted(x.shape) == sorted(made.shape)
            facts.append(Fact(call.place, {"permutes": float(sure)}, words))
    return first_at_each_place(facts)


def _loses_one(x: Tensor, part: Tensor) -> bool:
    """Return whether a call returns all of a tensor except one entry of one axis."""
    less = [a - b for a, b in zip(x.shape, part.shape, strict=False)]
    return x.ndim == part.ndim and sum(less) == 1 and min(less) == 0


def scrambles(call: Call) -> bool:
    """Return whether a reshape does more than split axes or join neighbouring ones."""
    x, made = call.args[0] if call.args else None, call.result
    if call.name not in FUNCTIONS or not isinstance(x, Tensor) or not isinstance(made, Tensor):
        return False
    return is_cut_across(x.shape, made.shape)


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
    found = [1]
    for size in shape:
        if size > 1:
            found.append(found[-1] * size)
    return found


def permuted(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the same shape by a permutation of axes, or of the parts that one axis is split into.

    It is None if there is no such permutation.
    """
    fitting = [p for p in permutations(range(x.ndim)) if tuple(x.shape[i] for i in p) == shape]
    moved = [p for p in fitting if p != tuple(range(x.ndim))]
    if moved:  # the first keeps the order of axes of equal size
        return x.permute(moved[0])
    if x.ndim == 3 and len(shape) == 4:  # (B, T, H·D) → (B, H, T, D)
        b, heads, t, width = shape
        if x.shape == (b, t, heads * width):
            return x.reshape(b, t, heads, width).transpose(1, 2)
    if x.ndim == 4 and len(shape) == 3:  # (B, H, T, D) → (B, T, H·D)
        b, heads, t, width = x.shape
        if shape == (b, t, heads * width):
            return x.transpose(1, 2).reshape(shape)
    return None
