"""Does the loss compare each output with the targets of all samples, by broadcasting?"""

import warnings

from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

DIFFERENCES = ("sub", "subtract", "__sub__", "__rsub__", "rsub", "mse_loss", "l1_loss",
               "smooth_l1_loss", "huber_loss")  # fmt: skip


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return differences larger than their operands, of which one depends on parameters."""
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        if is_broadcast(call):
            a, b = call.args[:2]
            shapes = {"of": str(tuple(a.shape)), "and": str(tuple(b.shape))}
            found.setdefault(call.place, Fact(call.place, {"times": larger(a, b)}, shapes))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of losses of different shapes
        see_calls(setup.fork(), look)
    return Probed(tuple(found.values()))


def is_broadcast(call: Call) -> bool:
    """Return whether a call subtracts an output and a target with different numbers of dimensions.

    Both have the same number of samples, for example (B, 1) and (B,), whose difference is (B, B).
    """
    if call.name not in DIFFERENCES or len(call.args) < 2:
        return False
    a, b = call.args[:2]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.ndim == b.ndim:
        return False
    is_compared = a.requires_grad != b.requires_grad
    alike = bool(a.ndim and b.ndim) and len(a) == len(b) > 1
    return is_compared and alike and larger(a, b) > 1


def larger(a: Tensor, b: Tensor) -> float:
    """Return the number of entries of the difference over that of the larger operand."""
    sides = zip(reversed([*_padded(a, b)]), reversed([*_padded(b, a)]), strict=True)
    entries = 1
    for m, n in sides:
        if m != n and 1 not in (m, n):
            return 0.0
        entries *= max(m, n)
    return entries / max(a.numel(), b.numel(), 1)


def _padded(x: Tensor, y: Tensor) -> tuple[int, ...]:
    return (*(1,) * max(0, y.ndim - x.ndim), *x.shape)
