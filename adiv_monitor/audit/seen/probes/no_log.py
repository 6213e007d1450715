"""Does a loss of log-probabilities receive probabilities or logits?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

LOSSES = ("nll_loss", "kl_div")
_CLOSE = 1e-3  # rounding of a sum of probabilities
_FAR = 0.1  # distance of the logarithm of the sum from 0 that no rounding explains


def ask(setup: Setup, trained: Fork) -> Probed:
    """Report inputs of `nll_loss` and `kl_div` whose exponentials do not sum to 1.

    A loss that adds their `logsumexp` itself is a cross-entropy.
    """
    found: dict[str, Fact] = {}
    inputs: dict[str, Tensor] = {}
    added: list[Tensor] = []

    def look(call: Call) -> None:
        x = call.argument(0, "input")
        if call.name == "logsumexp" and isinstance(x, Tensor):
            added.append(x.clone())
        given = "probabilities" if lacks_log(call) else "logits" if lacks_softmax(call) else ""
        if given:
            words = {"function": call.name, "given": given}
            found.setdefault(call.place, Fact(call.place, {}, words))
            inputs.setdefault(call.place, x.clone())

    with torch.no_grad():
        see_calls(setup.fork(), look)
        for place, x in inputs.items():
            if any(y.shape == x.shape and torch.allclose(x, y) for y in added):
                del found[place]
    return Probed(tuple(found.values()))


@torch.no_grad()
def lacks_log(call: Call) -> bool:
    """Return whether the input is probabilities of several classes."""
    x = _input(call)
    return x is not None and any(
        _is_one(x, axis) and not _is_one(x.exp(), axis) for axis in _class_axes(x)
    )


@torch.no_grad()
def lacks_softmax(call: Call) -> bool:
    """Return whether the input of `nll_loss` can't be log-probabilities along any axis.

    Log-probabilities are at most 0, and the sum of their exponentials is 1. Scores of which most
    rows violate this, some with positive entries, are not normalised.
    """
    x = _input(call)
    if x is None or call.name != "nll_loss" or lacks_log(call) or not bool(x.isfinite().all()):
        return False
    sums = (x.float().logsumexp(axis).abs() for axis in range(x.ndim) if x.shape[axis] > 1)
    return bool(x.max() > 0) and all(bool(off.median() > _FAR) for off in sums)


def _input(call: Call) -> Tensor | None:
    x = call.argument(0, "input") if call.name in LOSSES else None
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point() or not x.numel():
        return None
    return x if _class_axes(x) else None


def _class_axes(x: Tensor) -> list[int]:
    return [axis for axis in {1, x.ndim - 1} if x.shape[axis] > 1]


def _is_one(x: Tensor, axis: int) -> bool:
    return bool(x.min() >= 0) and bool((x.float().sum(axis) - 1).abs().max() < _CLOSE)
