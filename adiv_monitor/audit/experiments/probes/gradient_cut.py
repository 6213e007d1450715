"""Is the gradient cut in front of parameters that the loss depends on?"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


@asks("gradient-cut")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the cosine of the gradient with the gradient without the cut, for each cut.

    Only parameters whose gradient the cut changes count: in front of it there may be few. Also
    return the cosine of the gradient with the part that the cut removes: two players oppose each
    other.
    """
    found = cuts(setup.fork())
    if not found:
        return ()
    as_it_is = _gradients(setup.fork())
    fork = setup.fork()
    undo(fork, found)
    undone = _gradients(fork)
    dots = [0.0, 0.0, 0.0]
    for g, h in zip(as_it_is, undone, strict=True):
        if torch.equal(g, h):
            continue
        for i, (a, b) in enumerate(((g, g), (h, h), (g, h))):
            dots[i] += float((a.double() * b.double()).sum())
    own, other, between = dots
    cosine = between / math.sqrt(own * other) if own > 0 and other > 0 else 0.0
    apart = own * (other - 2 * between + own)  # squares of the gradient and of the removed part
    removed = (between - own) / math.sqrt(apart) if apart > 0 else 0.0
    numbers = {"cosine": cosine, "removed": removed}
    places = dict.fromkeys(call.place.replace("__get__", ".data") for call in found)
    return tuple(Fact(place, numbers) for place in places)


def cuts(fork: Fork) -> list[Call]:
    """Return the first function of each cut whose result reaches parameters, maybe indirectly.

    A cut is a `detach()`, a `.data`, or a call under `torch.no_grad()` that depends on parameters.
    Values that are added to another path with a gradient, as in a straight-through estimator, or
    compared with outputs, as the target of a siamese network, reach no parameters.
    """
    without: dict[int, tuple[Call, Tensor]] = {}  # id of a cut tensor → call, tensor (kept alive)
    found: dict[int, Call] = {}

    def look(call: Call) -> None:
        made = [x for x in _plain(call.result) if x.is_floating_point()]
        given = _plain([*call.args, *call.kwargs.values()])
        # What a custom function computes without a graph has a gradient once it has returned.
        before = [without[id(x)][0] for x in given if id(x) in without and not x.requires_grad]
        if is_cut(call, given):
            before = before or [call]
        elif any(x.requires_grad for x in made):
            if any(x.requires_grad and x.is_leaf for x in given):
                found.update((origin.number, origin) for origin in before)
            return
        for origin in before[:1]:
            without.update((id(x), (origin, x)) for x in made if not x.requires_grad)

    see_calls(fork, look)
    return list(found.values())


def is_cut(call: Call, given: list[Tensor]) -> bool:
    """Return whether a value that depends on parameters loses its gradient in this call."""
    depends = any(x.requires_grad for x in given)
    return depends and (_detaches(call) or not torch.is_grad_enabled())


def _detaches(call: Call) -> bool:
    return call.name == "detach" or call.function == _DATA


def undo(fork: Fork, found: list[Call]) -> None:
    """Undo the cuts at this place from now on; if it is under `no_grad()`, undo all of those."""
    numbers = {call.number for call in found}
    under = not all(map(_detaches, found))

    def change(call: Call) -> Any:
        if call.number in numbers and _detaches(call):
            return call.args[0]
        if under and not torch.is_grad_enabled():
            with torch.enable_grad():
                return call.function(*call.args, **call.kwargs)
        return NotImplemented

    change_calls(fork, change)


def _gradients(fork: Fork) -> list[Tensor]:
    with seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(fork.batches[0])).backward()  # type: ignore[no-untyped-call]
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in held(fork.optimizer)]  # fmt: skip


def _plain(value: Any) -> list[Tensor]:
    """Yield tensors, also those in nested lists."""
    return list(_flat(value))


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, Tensor):
        yield value
