"""Is anything divided by numbers of both signs, of which some are close to zero?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCHES = 4  # most batches, if the first has divisors of both signs
FEWEST = 16  # fewest divisors
_DIVISORS = {"div": 1, "divide": 1, "true_divide": 1, "__truediv__": 1, "__itruediv__": 1,
             "__rtruediv__": 0, "__rdiv__": 0, "reciprocal": 0}  # fmt: skip


@asks("unsafe-division")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return divisions by tensors of both signs, with the size of the smallest over the median one.

    Also return the largest result over the median one, without units that are off.
    """
    fork = setup.fork()
    divisors: dict[str, list[Tensor]] = {}
    results: dict[str, list[Tensor]] = {}

    def look(call: Call) -> None:
        place = _DIVISORS.get(call.name)
        divisor = None if place is None else call.argument(place, "other")
        if isinstance(divisor, Tensor) and divisor.is_floating_point():
            divisors.setdefault(call.place, []).append(divisor.detach().float().flatten())
            sizes = call.result.detach().float().abs()
            results.setdefault(call.place, []).append(sizes[sizes > 0])

    with torch.no_grad():
        for batch in setup.batches[:BATCHES]:
            see_calls(fork, look, batch)
            if all(closeness(torch.cat(parts)) is None for parts in divisors.values()):
                return ()
    found = []
    for place, parts in divisors.items():
        close, sizes = closeness(torch.cat(parts)), torch.cat(results[place])
        if close is not None and len(sizes) and bool(sizes.isfinite().all()):
            times = float(sizes.max() / sizes.median())
            found.append(Fact(place, {"close": close, "times": times}))
    return tuple(found)


def closeness(divisors: Tensor) -> float | None:
    """Return the smallest size of the divisors over the median one; None: they have one sign."""
    is_mixed = bool((divisors > 0).any()) and bool((divisors < 0).any())
    if len(divisors) < FEWEST or not is_mixed:
        return None
    sizes = divisors.abs().sort().values
    middle = float(sizes[len(sizes) // 2])
    return float(sizes[0]) / middle if middle > 0 else None
