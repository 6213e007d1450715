"""Does the loss compare each output with the targets of all samples, by broadcasting?"""

import warnings

from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

DIFFERENCES = ("sub", "subtract", "__sub__", "__rsub__", "rsub", "mse_loss", "l1_loss",
               "smooth_l1_loss", "huber_loss")  # fmt: skip


def ask(setup: Setup, trained: Fork) -> Probed:
    """Differences of what depends on the parameters and what does not, larger than either."""
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        if is_broadcast(call):
            a, b = call.args[:2]
            shapes = {"of": str(tuple(a.shape)), "and": str(tuple(b.shape))}
            found.setdefault(call.place, Fact(call.place, {"times": larger(a, b)}, shapes))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of losses of unlike shapes
        see_calls(setup.fork(), look)
    return Probed(tuple(found.values()))


def is_broadcast(call: Call) -> bool:
    """Whether it is a difference of an output and a target of other dimensions, of as many samples.

    Of (B, 1) and (B,), say, whose difference is (B, B).
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
    """How many times as many entries the difference has as the larger of the two."""
    sides = zip(reversed([*_padded(a, b)]), reversed([*_padded(b, a)]), strict=True)
    entries = 1
    for m, n in sides:
        if m != n and 1 not in (m, n):
            return 0.0
        entries *= max(m, n)
    return entries / max(a.numel(), b.numel(), 1)


def _padded(x: Tensor, y: Tensor) -> tuple[int, ...]:
    return (*(1,) * max(0, y.ndim - x.ndim), *x.shape)
