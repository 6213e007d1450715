"""Rules about the user's own training loop, which only a monitor sees."""

import math
from collections.abc import Iterator
from statistics import median

from adiv_monitor.diagnosis.finding import LOWER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import these
from adiv_monitor.diagnosis.record import Record

# Norm of the gradient that was there before a step's first backward pass, over that of the gradient
# that the optimizer used. It is 0 if gradients are zeroed after each step; if never, it comes near
# 1 within a few steps.
KEPT = 0.1
FEWEST_LATER = 2  # measured steps after the first, in all of which a layer's gradient is kept


def not_zeroed(record: Record) -> Iterator[Finding]:
    """Find layers whose gradients are not zeroed between two steps of the optimizer.

    The first measured step is left out: a run may begin with gradients of other code. Several
    backward passes of one step are no fault, because `.grad` is zero before the first of them.
    """
    seen: dict[str, list[float]] = {}
    for report in record.reports[1:]:
        for path, reading in report.layers.items():
            if not math.isnan(reading.gradient_factor):  # else the gradient's size is not known
                seen.setdefault(path, []).append(reading.earlier_share)
    kept = {
        path: median(shares)
        for path, shares in seen.items()
        if len(shares) >= FEWEST_LATER and min(shares) > KEPT
    }
    if not kept:
        return
    layers = tuple(kept)
    largest = max(layers, key=lambda path: kept[path])
    yield Finding(
        "not-zeroed",
        layers,
        "act",
        (Evidence("norm of the gradient kept from earlier steps, over that of the gradient used",
                  kept[largest], KEPT, largest),),
        (
            Advice("call optimizer.zero_grad() once for every optimizer step, before the step's "
                   "first backward pass, even if several backward passes are added up for a step; "
                   "if you do, and another loss, such as a penalty, goes backward before the "
                   "forward pass, all is well"),
        ),
        f"The gradients of {these(record, layers)} are not zeroed between optimizer steps: "
        "before the first backward pass of a step through these layers, `.grad` holds a gradient, "
        f"of earlier steps or of another loss. Its norm is {kept[largest]:.3g} times that of the "
        "gradient that the optimizer used.",
        "At a lower learning rate, the optimizer still follows the sum of all gradients so far.",
        record.reports[1].step,
        LOWER_RATES,
    )  # fmt: skip
