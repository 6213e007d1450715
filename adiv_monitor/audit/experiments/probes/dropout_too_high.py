"""Does dropout drop most of its input?"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.dropout import rate_of, with_rate
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

HIGH = 0.7


@asks("dropout-too-high")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return dropout rates above 0.7, and the trained model's losses with and without it."""
    found = places(setup.fork())
    if not found:
        return ()
    batch = trained.batches[-1]
    bare = replace(trained)
    change_calls(
        bare, lambda call: with_rate(call, 0.0) if rate_of(call) > HIGH else NotImplemented
    )
    price = {"with": RepeatedLoss(trained).of(batch), "without": RepeatedLoss(bare).of(batch)}
    return tuple(Fact(place, {"rate": rate, **price}) for place, rate in found.items())


def places(fork: Fork) -> dict[str, float]:
    """Return where dropout is called with a rate above 0.7, with the rate."""
    found: dict[str, float] = {}

    def look(call: Call) -> None:
        if (rate := rate_of(call)) > HIGH:
            found.setdefault(call.place, rate)

    with torch.no_grad():
        see_calls(fork, look)
    return found
