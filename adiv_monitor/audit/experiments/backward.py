"""Questions about the backward pass: where it stops, and what changes it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, change_calls, given, see_calls
from adiv_monitor.audit.experiments.questions import Look, asks, looks
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact


def nodes_of(ends: Iterable[Any]) -> set[Any]:
    """Return these nodes of a graph, and all that their gradients pass on to."""
    seen: set[Any] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return seen


def backward(fork: Fork) -> list[Tensor]:
    """Return the gradients that reach the optimizer from the first batch; zeros: none."""
    with torch.enable_grad():
        fork.first_loss().backward()  # type: ignore[no-untyped-call]
        for hook in fork.optimizer._optimizer_step_pre_hooks.values():
            hook(fork.optimizer, (), {})
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in held(fork.optimizer)]  # fmt: skip


def cosine_and_ratio(some: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, float]:
    """Return the cosine of two gradients, 0 if one is zero, and the second's length over the first.

    The ratio is NaN if the first is zero.
    """
    pairs = [(g.double(), h.double()) for g, h in zip(some, others, strict=True)]
    own = sum(float(g.square().sum()) for g, _ in pairs)
    other = sum(float(h.square().sum()) for _, h in pairs)
    product = sum(float((g * h).sum()) for g, h in pairs)
    cosine = product / math.sqrt(own * other) if own > 0 and other > 0 else 0.0
    return cosine, math.sqrt(other / own) if own > 0 else math.nan


# Cuts


def cuts(fork: Fork) -> list[Call]:
    """Return the first function of each cut of the gradient whose result meets parameters.

    A cut is a `detach()`, a `.data`, a sample that `torch.normal` draws, or a call under
    `torch.no_grad()` that depends on parameters.
    Values that are added to another path with a gradient, as in a straight-through estimator, or
    compared with outputs, as the target of a siamese network, meet no parameters; unless that path
    begins with the same values.
    """
    without: dict[int, tuple[Call, Tensor]] = {}  # tensors are held: ids stay unique
    found: dict[int, Call] = {}

    def see(call: Call) -> None:
        taken = given(call)
        # What a custom function computes without a graph has a gradient once it has returned.
        cut = [without[id(x)][0] for x in taken if id(x) in without and not x.requires_grad]
        meets = call.path is not None and any(x.requires_grad and x.is_leaf for x in taken)
        if any(x.requires_grad for x in taken):
            if _detaches(call) or _draws(call) or not torch.is_grad_enabled():
                cut = cut or [call]
            elif meets or _is_beside(cut, call):
                found.update((origin.number, origin) for origin in cut)
        cut = [call] if cut and _draws(call) else cut
        for x in tensors(call.result) if cut else ():
            if x.is_floating_point() and not x.requires_grad:
                without[id(x)] = cut[0], x

    see_calls(
        fork, see, change=lambda call: _drawn(call).detach() if _draws(call) else NotImplemented
    )
    return [*found.values()]


def _is_beside(cut: list[Call], call: Call) -> bool:
    """Return whether a call adds what was cut to what has been computed from it, as in a block."""
    before = getattr(cut[0].args[0], "grad_fn", None) if cut and call.name == "add" else None
    return before is not None and before in nodes_of(x.grad_fn for x in given(call))


def _detaches(call: Call) -> bool:
    return call.name == "detach" or call.function == Tensor.data.__get__  # type: ignore[attr-defined]


def _draws(call: Call) -> bool:
    return call.function == torch.normal and isinstance(call.argument(0, "mean"), Tensor)


def _drawn(call: Call) -> Tensor:
    """Return the sample, with the gradient of its mean."""
    mean: Tensor = call.argument(0, "mean")
    made: Tensor = call.function(*call.args, **call.kwargs)
    return mean + (made - mean).detach() if made.shape == mean.shape else made


def undo(fork: Fork, found: list[Call]) -> None:
    """Undo the cuts at this place from now on; if it is under `no_grad()`, undo all of those."""
    numbers = {call.number for call in found}
    under = not all(map(_detaches, found))

    def change(call: Call) -> Any:
        if _draws(call):
            with torch.enable_grad():
                return _drawn(call)
        if call.number in numbers and _detaches(call):
            return call.args[0]
        if under and not torch.is_grad_enabled():
            with torch.enable_grad():
                return call.function(*call.args, **call.kwargs)
        return NotImplemented

    change_calls(fork, change)


@asks("gradient-cut")
def gradient_cut(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the cosine of the gradient with the gradient without the cut, for each cut.

    Only parameters whose gradient the cut changes count: in front of it there may be few. Also
    return the cosine of the gradient with the part that the cut removes: two players oppose each
    other.
    """
    found = cuts(setup.fork())
    if not found:
        return ()
    fork = setup.fork()
    undo(fork, found)
    pairs = zip(backward(setup.fork()), backward(fork), strict=True)
    changed = [(g, h) for g, h in pairs if not torch.equal(g, h)]
    own, uncut = [g for g, _ in changed], [h for _, h in changed]
    removed = [h - g for g, h in changed]
    others = {"cosine": uncut, "removed": removed}
    numbers = {name: cosine_and_ratio(own, other)[0] for name, other in others.items()}
    words = {"drawn": "True"} if any(map(_draws, found)) else {}
    return [Fact(call.place.replace("__get__", ".data"), numbers, words) for call in found]


# Functions of zero slope

STEPS = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside")


@looks("zero-slope")
class ZeroSlope(Look):
    """Tells steps, which have no slope anywhere, whose argument no gradient reaches otherwise."""

    def __init__(self, fork: Fork) -> None:
        self._seen: list[tuple[str, Tensor, Tensor]] = []  # place, argument, result

    def see(self, call: Call) -> None:
        """Note a step."""
        x, made = next((x for x in given(call) if x.requires_grad), None), call.result
        if call.name in STEPS and x is not None and x is not made and made.requires_grad:
            x.retain_grad()
            made.retain_grad()
            self._seen.append((call.place, x, made))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the steps at whose result a gradient arrives."""
        for place, x, made in self._seen:
            arrives, passes = (y.grad is not None and bool(y.grad.any()) for y in (made, x))
            if arrives and not passes:
                yield Fact(place)
