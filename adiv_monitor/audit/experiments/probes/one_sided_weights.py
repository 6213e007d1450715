"""Do weights that multiply inputs begin with nearly one sign, like those of torch.rand?"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FUNCTIONS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm",
             "einsum", "conv1d", "conv2d", "conv3d", "bilinear")  # fmt: skip
LEAST = 64  # fewest entries: the mean of fewer differs from zero by chance
ONE_SIDED = 0.3  # abs(mean) / rms
DEVIATIONS = 4.0  # of the mean of independent entries around zero: 1 / sqrt(their number)


@asks("one-sided-weights")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return abs(mean) / rms of each weight for which it is above 0.3, and not by chance."""
    fork = setup.fork()
    found = one_sided(fork)
    return tuple(
        Fact(name, {"mean": float(p.detach().mean()), "share": share(p)})
        for name, p in found.items()
    )  # fmt: skip


def one_sided(fork: Fork) -> dict[str, Tensor]:
    """Return name → share, in the order in which the weights are used."""
    names = {id(p): name for name, p in fork.model.named_parameters()}
    found: dict[str, Tensor] = {}

    def look(call: Call) -> None:
        for x in call.args if call.name in FUNCTIONS else ():
            name = names.get(id(x))
            if name is None or x.ndim < 2 or x.numel() < LEAST or not x.requires_grad:
                continue
            if x.is_complex():  # complex numbers have no sign
                continue
            if share(x) > max(ONE_SIDED, DEVIATIONS / math.sqrt(x.numel())):
                found[name] = x

    with torch.no_grad():
        see_calls(fork, look)
    return found


def share(weight: Tensor) -> float:
    """Return abs(mean) / rms of the entries, 0 to 1."""
    x = weight.detach().double()
    rms = float(x.square().mean().sqrt())
    return abs(float(x.mean())) / rms if rms > 0 else 0.0
