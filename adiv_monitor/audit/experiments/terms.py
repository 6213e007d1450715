"""Questions about the terms of the loss: the numbers that are added, or subtracted, last."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import backward
from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.inputs import by_name, changed, is_input
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import mapped, size_of
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.record import Fact

STEPS = 60  # most steps of the copy without the penalty; the run may have more
# A copy is trained only if the other terms rise by less than this share if inputs are exchanged.
LITTLE = 0.1
_BATCHES = 2
_SAME = 1e-5  # relative rounding of a term in which samples come in another order
_SUMS = ("AddBackward", "SubBackward", "RsubBackward")
_SCALINGS = ("Mul", "Div", "Neg", "Mean", "Sum", "Squeeze", "View", "Clone")


class Terms:
    """Follows the numbers with a gradient in a pass, as its calls are reported.

    A term is a node of the graph: what is changed in place afterwards keeps its own.
    """

    def __init__(self) -> None:
        self.values: dict[Any, float] = {}

    def see(self, call: Call) -> None:
        """Note a number."""
        if isinstance(call.result, Tensor) and not call.result.ndim and call.result.requires_grad:
            self.values[call.result.grad_fn] = float(call.result.detach())

    def of(self, loss: Tensor) -> dict[Any, float]:
        """Return the terms of the loss, each with its part of the loss's value."""
        return dict(self._parts(loss.grad_fn, 1.0))

    def _parts(self, node: Any, factor: float) -> Iterator[tuple[Any, float]]:
        """Yield the terms of a sum, or of one that is scaled by a number."""
        before = [n for n, _ in node.next_functions if n is not None]
        if node.name().startswith(_SUMS):
            signs = (-1.0 if node.name().startswith("Rsub") else 1.0,
                     -1.0 if node.name().startswith("Sub") else 1.0)  # fmt: skip
            for (n, _), sign in zip(node.next_functions, signs, strict=False):
                if n is not None:
                    yield from self._parts(n, sign * factor)
        elif node.name().startswith(_SCALINGS) and len(before) == 1 and self.values.get(before[0]):
            yield from self._parts(before[0], factor * self._value(node) / self.values[before[0]])
        else:
            yield node, factor * self._value(node)

    def _value(self, node: Any) -> float:
        """Return the number; a parameter's own node holds it."""
        return self.values[node] if node in self.values else float(node.variable)


@asks("penalty-dominates")
def penalty_dominates(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Train a copy without penalties, and compare what is learned of the inputs.

    A penalty is a term of the loss that stays the same if the model's inputs are exchanged between
    samples, such as one of the outputs' size, or a divergence from a prior: it does not depend on
    which input belongs to which target. At least one of the other terms does: by how much it rises
    with exchanged inputs is what the model has learned of them. All penalties are taken as one.
    Terms that alone teach some parameters, such as a codebook, are no penalty.
    """
    batches = setup.batches[:_BATCHES]
    own = _terms(setup.fork(), batches)
    if len(own) < 2:
        return ()
    exchanged = _terms(setup.fork(), batches, exchanged=True)
    after = _terms(setup.fork_like(trained), batches)
    moved = _terms(setup.fork_like(trained), batches, exchanged=True)
    if not len(own) == len(exchanged) == len(after) == len(moved):
        return ()
    pairs = zip(zip(own, exchanged, strict=True), zip(after, moved, strict=True), strict=True)
    penalties = {i for i, (x, y) in enumerate(pairs) if _alike(*x) and _alike(*y)}
    learnt, left = sum(moved) - sum(after), _others(after, penalties)
    if not 0 < len(penalties) < len(own) or not learnt < LITTLE * abs(left):
        return ()
    if _taught(_without(setup.fork(), penalties)) != _taught(setup.fork()):
        return ()
    fork = _without(replace(setup, steps=min(setup.steps, STEPS)).fork(), penalties)
    if not all(map(math.isfinite, train(fork).losses)):
        return ()
    freed = _others(_terms(setup.fork_like(fork), batches), penalties)
    alone = _terms(setup.fork_like(fork), batches, exchanged=True)
    numbers = {
        "with": learnt,
        "without": _others(alone, penalties) - freed,
        "others": freed,
        "penalty": sum(own) - _others(own, penalties),
        "penalty after": sum(after) - left,
    }
    return (Fact("", numbers),)


def _terms(fork: Fork, batches: Sequence[Any], exchanged: bool = False) -> list[float]:
    """Return the terms, summed over batches; with inputs exchanged between samples or not."""
    if exchanged:
        fork.model.register_forward_pre_hook(_exchange, with_kwargs=True)
    found = []
    for batch in batches:
        terms = Terms()
        with torch.enable_grad():
            found.append([*terms.of(see_calls(fork, terms.see, batch)).values()])
    return [sum(x) for x in zip(*found, strict=True)] if len({*map(len, found)}) == 1 else []


def _exchange(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    size = size_of(by_name(module, args, kwargs))

    def moved_on(x: Tensor) -> Tensor:
        return x.roll(1, 0) if x.ndim and len(x) == size else x

    return changed(
        module, args, kwargs, lambda name, x: mapped(x, moved_on) if is_input(name) else x
    )


def _without(fork: Fork, left_out: set[int]) -> Fork:
    """Return the fork, whose terms with these numbers have no gradient from now on."""
    terms = Terms()

    def change(call: Call) -> Any:
        result = call.function(*call.args, **call.kwargs)
        terms.see(call._replace(result=result))
        return result

    def loss(model: nn.Module, batch: Any) -> Tensor:
        terms.values.clear()
        found = watched(model, batch)
        for i, node in enumerate(terms.of(found)):
            if i in left_out:
                node.register_prehook(lambda grads: tuple(0 * g for g in grads))
        return found

    change_calls(fork, change)
    watched, fork.loss = fork.loss, loss
    return fork


def _taught(fork: Fork) -> list[bool]:
    """Return whether each parameter has a gradient, of a fork's first batch."""
    return [bool(g.any()) for g in backward(fork)]


def _others(terms: list[float], penalties: set[int]) -> float:
    return sum(x for i, x in enumerate(terms) if i not in penalties)


def _alike(x: float, y: float) -> bool:
    return abs(x - y) <= _SAME * max(abs(x), abs(y))
