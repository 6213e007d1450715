"""Does a penalty in the loss keep the terms beside it from falling?"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, change_calls
from adiv_monitor.audit.experiments.inputs import by_name, changed, is_input
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, mapped, size_of
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.record import Fact

STEPS = 60  # most steps of the copy without the penalty; the run may have more
# A copy is trained only if the other terms rise by less than this share if inputs are exchanged.
LITTLE = 0.1
_BATCHES = 2
_SAME = 1e-5  # relative rounding of a term in which samples come in another order
_SUMS = ("add", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__rsub__", "__isub__")


@asks("penalty-dominates")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Train a copy without penalties, and compare what is learned of the inputs.

    A penalty is a term of the loss that stays the same if the model's inputs are exchanged between
    samples, such as one of the outputs' size, or a divergence from a prior: it does not depend on
    which input belongs to which target. At least one of the other terms does: by how much it rises
    with exchanged inputs is what the model has learned of them. All penalties are taken as one.
    Terms that alone teach some parameters, such as a codebook, are no penalty.
    """
    begin, batches = _Terms(setup.fork()), setup.batches[:_BATCHES]
    if len(begin.of(batches[:1])) < 2:
        return ()
    end = _Terms(setup.fork_like(trained))
    own, exchanged = begin.of(batches), begin.of(batches, exchanged=True)
    after, moved = end.of(batches), end.of(batches, exchanged=True)
    if not len(own) == len(exchanged) == len(after) == len(moved):
        return ()
    same = [_alike(*x) and _alike(*y) for x, y in zip(
        zip(own, exchanged, strict=True), zip(after, moved, strict=True), strict=True)]  # fmt: skip
    penalties = frozenset(i for i, is_same in enumerate(same) if is_same)
    learnt, left = sum(moved) - sum(after), _others(after, penalties)
    if not 0 < len(penalties) < len(own) or not learnt < LITTLE * abs(left):
        return ()
    without = setup.fork()
    _Terms(without, without=penalties)
    if _taught(without) != _taught(setup.fork()):
        return ()
    fork = replace(setup, steps=min(setup.steps, STEPS)).fork()
    terms = _Terms(fork, without=penalties)
    if not all(map(math.isfinite, train(fork).losses)):
        return ()
    freed = _others(terms.of(batches), penalties)
    numbers = {
        "with": learnt,
        "without": _others(terms.of(batches, exchanged=True), penalties) - freed,
        "others": freed,
        "penalty": sum(own) - _others(own, penalties),
        "penalty after": sum(after) - left,
    }
    return (Fact("", numbers),)


def _taught(fork: Fork) -> list[bool]:
    """Return whether each parameter has a gradient, of a fork's first batch."""
    with seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(fork.batches[0])).backward()  # type: ignore[no-untyped-call]
    return [p.grad is not None and bool(p.grad.any()) for p in fork.model.parameters()]


def _others(terms: list[float], penalties: frozenset[int]) -> float:
    return sum(x for i, x in enumerate(terms) if i not in penalties)


def _alike(x: float, y: float) -> bool:
    return abs(x - y) <= _SAME * max(abs(x), abs(y))


class _Terms:
    """The terms of a fork's loss: the numbers that are added, or subtracted, last."""

    def __init__(self, fork: Fork, without: frozenset[int] = frozenset()) -> None:
        """Note terms in each call of the loss; leave out those with these numbers."""
        self._fork, self._without = fork, without
        self._sums: dict[int, tuple[Tensor, list[tuple[Tensor, float]]]] = {}
        self._exchanged = False
        self._last: list[float] = []
        change_calls(fork, self._note)
        self._loss = fork.loss
        fork.loss = self._noted
        fork.model.register_forward_pre_hook(self._exchange, with_kwargs=True)

    def of(self, batches: Any, exchanged: bool = False) -> list[float]:
        """Return the terms, summed over batches; with inputs exchanged between samples or not."""
        self._exchanged = exchanged
        loss, found = RepeatedLoss(self._fork), []
        for batch in batches:
            loss.of(batch)
            found.append(self._last)
        self._exchanged = False
        alike = len({len(terms) for terms in found}) == 1
        return [sum(parts) for parts in zip(*found, strict=True)] if alike else []

    def _noted(self, model: nn.Module, batch: Any) -> Tensor:
        self._sums = {}
        loss = self._loss(model, batch)
        terms = self._sums[id(loss)][1] if id(loss) in self._sums else [(loss, 1.0)]
        self._last = [sign * float(x.detach()) for x, sign in terms]
        for number in self._without:
            if number < len(terms):
                term, sign = terms[number]
                loss = loss - sign * term
        return loss

    def _note(self, call: Call) -> Any:
        """Note the terms of a sum, or of a sum that is scaled by a number."""
        operands = [x for x in call.args[:2] if isinstance(x, Tensor)]
        if call.kwargs or not operands or not all(map(_is_number, call.args[:2])):
            return NotImplemented
        parts: list[tuple[Tensor, float]] = []
        if call.name in _SUMS and len(call.args) == 2:
            minus = "sub" in call.name
            signs = (-1.0 if call.name == "__rsub__" else 1.0,
                     -1.0 if minus and call.name != "__rsub__" else 1.0)  # fmt: skip
            for x, sign in zip(call.args, signs, strict=True):
                parts += [(y, sign * own) for y, own in self._terms(x)]
        elif id(operands[0]) in self._sums and call.name in ("mean", "sum", "squeeze"):
            parts = self._terms(operands[0])
        else:
            return NotImplemented
        result = call.function(*call.args)
        if isinstance(result, Tensor):
            self._sums[id(result)] = result, parts
        return result

    def _terms(self, x: Any) -> list[tuple[Tensor, float]]:
        """Return the terms of a sum; of another number with a gradient, a copy of itself.

        The copy keeps its value if more is added to the number in place.
        """
        if not isinstance(x, Tensor) or not x.requires_grad:
            return []
        return self._sums[id(x)][1] if id(x) in self._sums else [(x.clone(), 1.0)]

    def _exchange(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._exchanged:
            return None
        size = size_of(by_name(module, args, kwargs))

        def moved_on(x: Tensor) -> Tensor:
            return x.roll(1, 0) if x.ndim and len(x) == size else x

        def exchanged(name: str, x: Any) -> Any:
            return mapped(x, moved_on) if is_input(name) else x

        return changed(module, args, kwargs, exchanged)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.ndim == 0)
