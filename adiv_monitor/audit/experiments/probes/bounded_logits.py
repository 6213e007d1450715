"""Do logits stay between −1 and 1 for all weights, like cosines without a temperature?"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

CLASSES = 8  # fewest classes: with fewer, the lowest loss is not far from zero
MOST = 0.9  # share of the logits
TIMES = 10.0
GROWN = 3.0  # small logits without bounds grow at least as the last layer's weights


@asks("bounded-logits")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of a trained model's logits within ±1, also with larger weights."""
    state = trained.model.state_dict()
    shares, sizes, place, classes = [], [], "", 0
    for factor in (1.0, TIMES):
        fork = setup.fork()
        fork.model.load_state_dict(state)
        with torch.no_grad():
            for p in fork.model.parameters():
                p.mul_(factor)
        seen = logits(fork)
        if not seen or seen[0][1].shape[1] < CLASSES:
            return ()
        place, classes = seen[0][0].place, seen[0][1].shape[1]
        shares.append(min(float((x.abs() <= 1).float().mean()) for _, x in seen))
        sizes.append(max(float(x.float().square().mean()) ** 0.5 for _, x in seen))
        if not shares[-1] > MOST:
            return ()
    if not 0 < sizes[1] < GROWN * sizes[0]:
        return ()
    floor = math.log1p((classes - 1) * math.exp(-2))
    return (Fact(place, {"share": min(shares), "classes": classes, "floor": floor}),)


def logits(fork: Fork) -> list[tuple[Call, Tensor]]:
    """Return the inputs of each cross-entropy, with the classes in dim 1."""
    found: list[tuple[Call, Tensor]] = []

    def look(call: Call) -> None:
        x = call.argument(0, "input")
        if call.name == "cross_entropy" and isinstance(x, Tensor) and x.ndim > 1:
            found.append((call, x.detach()))

    with torch.no_grad():
        see_calls(fork, look)
    return found
