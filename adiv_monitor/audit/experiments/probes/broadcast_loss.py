"""Does the loss combine each output with the targets of all samples, by broadcasting?"""

import warnings
from collections.abc import Iterable

from torch import Tensor, broadcast_shapes

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

DIFFERENCES = ("sub", "subtract", "__sub__", "__rsub__", "rsub", "mse_loss", "l1_loss",
               "smooth_l1_loss", "huber_loss")  # fmt: skip


@asks("broadcast-loss")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return results larger than their operands, of which one depends on parameters."""
    facts: dict[str, Fact] = {}
    for call in broadcasts(setup.fork()):
        a, b = call.args[:2]
        words = {"of": str(tuple(a.shape)), "and": str(tuple(b.shape))}
        if call.name not in DIFFERENCES:
            words["by"] = "another function"
        facts.setdefault(call.place, Fact(call.place, {"times": larger(a, b)}, words))
    return tuple(facts.values())


def broadcasts(fork: Fork) -> list[Call]:
    """Return the calls that combine an output with the targets, or weights, of other samples."""
    found: list[Call] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of losses of different shapes
        see_calls(fork, lambda call: found.append(call) if _is_broadcast(call) else None)
    return found


def _is_broadcast(call: Call) -> bool:
    """Return whether a call combines two tensors with different numbers of dimensions.

    Both have the same number of samples, for example (B, 1) and (B,), whose difference is (B, B).
    Other functions than differences count outside the model, if they work entry by entry.
    """
    if len(call.args) < 2:
        return False
    a, b = call.args[:2]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.ndim == b.ndim:
        return False
    is_compared = a.requires_grad != b.requires_grad
    alike = bool(a.ndim and b.ndim) and len(a) == len(b) > 1
    is_met = call.name in DIFFERENCES or _is_by_entry(call, a, b)
    return is_compared and alike and is_met and larger(a, b) > 1


def _is_by_entry(call: Call, a: Tensor, b: Tensor) -> bool:
    """Return whether a function of the loss has a result of the shape of both operands together.

    Each operand has one number for each sample: vectors may be paired on purpose.
    """
    if call.path is not None or not isinstance(call.result, Tensor) or not larger(a, b):
        return False
    if a.numel() != len(a) or b.numel() != len(b):
        return False
    both = broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    return call.result.requires_grad and call.result.shape == both


def larger(a: Tensor, b: Tensor) -> float:
    """Return the number of entries of the result over that of the larger operand."""
    sides = zip(reversed([*_padded(a, b)]), reversed([*_padded(b, a)]), strict=True)
    entries = 1
    for m, n in sides:
        if m != n and 1 not in (m, n):
            return 0.0
        entries *= max(m, n)
    return entries / max(a.numel(), b.numel(), 1)


def _padded(x: Tensor, y: Tensor) -> tuple[int, ...]:
    return (*(1,) * max(0, y.ndim - x.ndim), *x.shape)
