"""Reshapes that cut across the axes of their input, where a permutation is meant."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise

from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import first_at_each_place, looks
from adiv_monitor.audit.training.batches import first, size_of
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import Fact

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
        if call.name == "pad":
            self._shifted[id(made)] = made
        elif call.name == "__getitem__" and id(x) in self._crossing and _loses_one(x, made):
            del self._crossing[id(x)]
            self._shifted[id(made)] = made
        elif (
            call.name in FUNCTIONS
            and id(x) not in self._shifted
            and is_cut_across(x.shape, made.shape)
        ):
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
        return first_at_each_place(facts)


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
    found = [1]
    for size in shape:
        if size > 1:
            found.append(found[-1] * size)
    return found


def permutes(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether a permutation of axes, or of the heads that an axis holds, has that shape."""
    if len(before) > len(after):
        before, after = after, before
    if len(before) == 3 and len(after) == 4:  # (B, T, H·D) and (B, H, T, D)
        return before == (after[0], after[2], after[1] * after[3])
    return sorted(before) == sorted(after) and before != after
