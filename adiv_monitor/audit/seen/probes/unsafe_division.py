"""Is anything divided by numbers of both signs, of which some are close to zero?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

FEWEST = 16  # fewest divisors
# The smallest twentieth of the divisors, over their median: 0.09 for a normal distribution, 1 for
# divisors of one size.
CLOSE, SHARE = 0.2, 0.05
_DIVISORS = {"div": 1, "divide": 1, "true_divide": 1, "__truediv__": 1, "__itruediv__": 1,
             "__rtruediv__": 0, "__rdiv__": 0, "reciprocal": 0}  # fmt: skip


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return divisions by tensors of both signs, with the size of the smallest divisors."""
    found: dict[str, Fact] = {}

    def look(call: Call) -> None:
        place = _DIVISORS.get(call.name)
        divisor = None if place is None else call.argument(place, "other")
        if not isinstance(divisor, Tensor) or not divisor.is_floating_point():
            return
        close = closeness(divisor.detach())
        if close is not None and close < CLOSE and bool(call.result.isfinite().all()):
            sizes = call.result.detach().float().abs()
            sizes = sizes[sizes > 0]  # without units that are off
            times = float(sizes.max() / sizes.median()) if len(sizes) else 0.0
            found.setdefault(call.place, Fact(call.place, {"close": close, "times": times}))

    with torch.no_grad():
        see_calls(setup.fork(), look)
    return Probed(tuple(found.values()))


def closeness(divisor: Tensor) -> float | None:
    """Return the 5th percentile of the divisors' sizes over their median; None: of one sign."""
    values = divisor.float().flatten()
    if len(values) < FEWEST or not bool((values > 0).any()) or not bool((values < 0).any()):
        return None
    sizes = values.abs().sort().values
    smallest, middle = sizes[int(SHARE * len(sizes))], sizes[len(sizes) // 2]
    return float(smallest / middle) if float(middle) > 0 else None
