"""Does the loss compare a tensor with itself?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import gradient_norm
from adiv_monitor.diagnosis.record import Fact

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


@asks("zero-gradient")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the losses whose output and target are the same entries in memory.

    A detached tensor shares the memory of the tensor that it was detached from. A run whose last
    gradient is not zero is not looked at.
    """
    if gradient_norm(trained.optimizer) > 0:
        return ()
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        if call.name in LOSSES and _are_one(call.argument(0, "input"), call.argument(1, "target")):
            found.setdefault(call.place, Fact(call.place))

    with torch.no_grad():
        see_calls(setup.fork(), look)
    return tuple(found.values())


def _are_one(x: object, y: object) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    where = [(a.data_ptr(), tuple(a.shape), a.stride()) for a in (x, y)]
    return x.numel() > 0 and where[0] == where[1]
