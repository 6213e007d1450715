"""Does a penalty in the loss keep the terms beside it from falling?"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.seen.calls import Call, change_calls
from adiv_monitor.audit.seen.inputs import is_input, names_by_place
from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, size_of
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.record import Fact, Probed

STEPS = 60  # most steps of the copy without the penalty; the run may have more
# A copy is trained only if the other terms rise by less than this share if inputs are exchanged.
LITTLE = 0.1
MOST = 8  # most terms of a loss
_TRIED = 2  # most penalties that a copy is trained without, the largest first
_BATCHES = 2
_SAME = 1e-5  # relative rounding of a term in which samples come in another order
_SUMS = ("add", "__add__", "__radd__", "__iadd__", "sub", "__sub__", "__rsub__", "__isub__")


def ask(setup: Setup, trained: Fork) -> Probed:
    """Train a copy without each penalty, and compare what is learned of the inputs.

    A penalty is a term of the loss that stays the same if the model's inputs are exchanged between
    samples, such as one of the outputs' size, or a divergence from a prior: it does not depend on
    which input belongs to which target. At least one of the other terms does: by how much it rises
    with exchanged inputs is what the model has learned of them.
    """
    begin, batches = _Terms(setup.fork()), setup.batches[:_BATCHES]
    if not 1 < len(begin.of(batches[:1])) <= MOST:
        return Probed()
    own, exchanged = begin.of(batches), begin.of(batches, exchanged=True)
    end = _Terms(_copy(setup, trained))
    after, moved = end.of(batches), end.of(batches, exchanged=True)
    if not len(own) == len(exchanged) == len(after) == len(moved):
        return Probed()
    pairs = [((a, b), (c, d)) for a, b, c, d in zip(own, exchanged, after, moved, strict=True)]
    penalties = [i for i, each in enumerate(pairs) if all(_alike(*pair) for pair in each)]
    if len(penalties) == len(own):
        return Probed()
    found = []
    for i in sorted(penalties, key=lambda i: -abs(own[i]))[:_TRIED]:
        if not sum(moved) - sum(after) < LITTLE * abs(sum(after) - after[i]):
            continue
        fork = replace(setup, steps=min(setup.steps, STEPS)).fork()
        terms = _Terms(fork, without=i)
        if not all(map(torch.isfinite, torch.tensor(train(fork).losses))):
            continue
        freed = terms.of(batches), terms.of(batches, exchanged=True)
        others = [[sum(x) - x[i] for x in run] for run in ((after, moved), freed)]
        (here, here_moved), (there, there_moved) = others
        numbers = {"with": here_moved - here, "without": there_moved - there, "others": there}
        found.append(Fact("", {**numbers, "penalty": own[i], "penalty after": after[i]}))
    return Probed(tuple(found))


def _alike(x: float, y: float) -> bool:
    return abs(x - y) <= _SAME * max(abs(x), abs(y))


def _copy(setup: Setup, trained: Fork) -> Fork:
    fork = setup.fork()
    fork.model.load_state_dict(trained.model.state_dict())
    return fork


class _Terms:
    """The terms of a fork's loss: the numbers that are added, or subtracted, last."""

    def __init__(self, fork: Fork, without: int | None = None) -> None:
        """Note terms in each call of the loss; leave out term number `without`."""
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
        terms = self._expanded(loss, 1.0)
        self._last = [sign * float(x.detach()) for x, sign in terms]
        if self._without is not None and self._without < len(terms):
            term, sign = terms[self._without]
            loss = loss - sign * term
        return loss

    def _note(self, call: Call) -> Any:
        operands = call.args[:2]
        if call.name not in _SUMS or not all(map(_is_number, operands)) or call.kwargs:
            return NotImplemented
        result = call.function(*call.args)
        second = -1.0 if "sub" in call.name and call.name != "__rsub__" else 1.0
        first = -1.0 if call.name == "__rsub__" else 1.0
        if isinstance(result, Tensor) and not any(result is x for x in operands):
            pairs = zip(operands, (first, second), strict=True)
            parts = [(x, sign) for x, sign in pairs if isinstance(x, Tensor) and x.requires_grad]
            self._sums[id(result)] = result, parts
        return result

    def _expanded(self, x: Tensor, sign: float) -> list[tuple[Tensor, float]]:
        if id(x) not in self._sums:
            return [(x, sign)]
        parts = self._sums[id(x)][1]
        return [term for part, own in parts for term in self._expanded(part, sign * own)]

    def _exchange(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._exchanged:
            return None
        names = names_by_place(module, len(args))
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        size = size_of(given)

        def moved_on(x: Tensor) -> Tensor:
            return x.roll(1, 0) if x.ndim and len(x) == size else x

        new = {n: mapped(x, moved_on) if is_input(n) else x for n, x in given.items()}
        return tuple(new[n] for n in names), {n: new[n] for n in kwargs}


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.ndim == 0)
