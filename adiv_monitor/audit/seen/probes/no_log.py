"""Is a loss given probabilities where it wants their logarithms?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

LOSSES = ("nll_loss", "kl_div")
_CLOSE = 1e-3


def ask(setup: Setup, trained: Fork) -> Probed:
    """What `nll_loss` and `kl_div` are given: it sums to 1, and its exponential does not."""
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        if lacks_log(call):
            found.setdefault(call.place, Fact(call.place, {}, {"function": call.name}))

    with torch.no_grad():
        see_calls(setup.fork(), look)
    return Probed(tuple(found.values()))


@torch.no_grad()
def lacks_log(call: Call) -> bool:
    """Whether its input is probabilities of several classes."""
    x = call.argument(0, "input") if call.name in LOSSES else None
    if not isinstance(x, Tensor) or x.ndim < 2:
        return False
    axes = [axis for axis in {1, x.ndim - 1} if x.shape[axis] > 1]
    return any(_is_one(x, axis) and not _is_one(x.exp(), axis) for axis in axes)


def _is_one(x: Tensor, axis: int) -> bool:
    return bool(x.min() >= 0) and bool((x.float().sum(axis) - 1).abs().max() < _CLOSE)
