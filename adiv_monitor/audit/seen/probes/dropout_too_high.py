"""Does dropout drop most of its input?"""

import math
from dataclasses import replace

import torch

from adiv_monitor.audit.seen.calls import Call, change_calls, see_calls
from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

FUNCTIONS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
             "dropout3d", "feature_dropout")  # fmt: skip
HIGH = 0.7


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return dropout rates above 0.7, and the trained model's losses with and without it."""
    found = places(setup.fork())
    if not found:
        return Probed()
    batch = trained.batches[-1]
    bare = replace(trained)
    change_calls(
        bare, lambda call: with_rate(call, 0.0) if rate_of(call) > HIGH else NotImplemented
    )
    price = {"with": RepeatedLoss(trained).of(batch), "without": RepeatedLoss(bare).of(batch)}
    return Probed(tuple(Fact(place, {"rate": rate, **price}) for place, rate in found.items()))


def places(fork: Fork) -> dict[str, float]:
    """Return where dropout is called with a rate above 0.7, with the rate."""
    found: dict[str, float] = {}

    def look(call: Call) -> None:
        if (rate := rate_of(call)) > HIGH:
            found.setdefault(call.place, rate)

    with torch.no_grad():
        see_calls(fork, look)
    return found


def rate_of(call: Call) -> float:
    """Return the share that a call of a dropout function drops; 0 for other functions."""
    if call.name not in FUNCTIONS or not call.argument(2, "training", True):
        return 0.0
    rate = call.argument(1, "p", 0.5)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def with_rate(call: Call, rate: float) -> object:
    """Return the result of the same function at another rate."""
    x = call.argument(0, "input")
    others = {k: v for k, v in call.kwargs.items() if k not in ("input", "p")}
    return call.function(x, rate, *call.args[2:], **others)
