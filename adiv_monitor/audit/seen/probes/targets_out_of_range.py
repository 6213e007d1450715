"""Can the function behind the last layer reach the targets of a regression?"""

import math
from collections.abc import Mapping

from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.seen.probes.broadcast_loss import DIFFERENCES
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

RANGES: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "softplus": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "special_expit": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
}
BATCHES = 2


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the share of targets outside the range of the function on the outputs."""
    found: dict[str, list[float]] = {}
    words: dict[str, dict[str, str]] = {}
    for batch in setup.batches[:BATCHES]:
        for last, share in beyond(setup.fork(), batch):
            found.setdefault(last.place, []).append(share)
            low, high = RANGES[last.name]
            words[last.place] = {"function": last.name, "low": f"{low:g}", "high": f"{high:g}"}
    return Probed(tuple(
        Fact(place, {"share": sum(shares) / len(shares)}, words[place])
        for place, shares in found.items() if any(shares)
    ))  # fmt: skip


def beyond(fork: Fork, batch: object = None) -> list[tuple[Call, float]]:
    """Return calls of functions with a bounded range whose results are subtracted from targets.

    Each comes with the share of these targets outside the range. Results are identified by their
    memory.
    """
    made: dict[int, tuple[Call, int]] = {}
    found: list[tuple[Call, float]] = []

    def look(call: Call) -> None:
        result = call.result
        if call.name in RANGES and isinstance(result, Tensor):
            made[result.untyped_storage().data_ptr()] = call, result._version
        elif call.name in DIFFERENCES and len(call.args) > 1:
            a, b = call.args[:2]
            for output, target in ((a, b), (b, a)):
                if not isinstance(output, Tensor) or not isinstance(target, Tensor):
                    continue
                last, version = made.get(output.untyped_storage().data_ptr(), (None, -1))
                if last is None or version != output._version or target.requires_grad:
                    continue
                low, high = RANGES[last.name]
                outside = (target < low) | (target > high)
                found.append((last, float(outside.float().mean())))

    see_calls(fork, look, batch)
    return found
