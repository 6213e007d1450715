"""Schedulers of an optimizer, and the learning rates to which their warm-ups raise it."""

import copy
import gc
import math
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

MOST = 10_000  # steps for which a warm-up is followed
STILL = 1_000  # steps without a rise after which it is over


def lifted(optimizer: Optimizer, steps: int) -> dict[int, float]:
    """Return the groups whose learning rate a warm-up raises, with its highest rate.

    A copy of the scheduler is stepped until the rates fall, or have not risen for a while. A rate
    of 0 that is not raised within the given steps is left out: it is a fault, not a warm-up. If no
    scheduler of torch's is known, a rate of 0 is taken for the beginning of another's warm-up.
    """
    groups = {i: g for i, g in enumerate(optimizer.param_groups) if g.get("initial_lr", 0) > 0}
    schedulers = _schedulers(optimizer) if groups else []
    if not schedulers:
        return {i: float(g["initial_lr"]) for i, g in groups.items() if g["lr"] == 0}
    every = [_peaks(scheduler, steps) for scheduler in schedulers]
    return {i: max(peaks.get(i, 0.0) for peaks in every) for peaks in every for i in peaks}


def _peaks(scheduler: LRScheduler, steps: int) -> dict[int, float]:
    optimizer = scheduler.optimizer
    start = _rates(optimizer)
    peaks, rising, last, step = dict(start), set(start), 0, 0
    # Schedulers write to groups only: no parameters and no state are copied.
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer.state)] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler steps before the optimizer does
        try:
            moved = copy.deepcopy(scheduler, memo)
            while rising and step < MOST and step - last < STILL:
                moved.step()
                step += 1
                rates = _rates(moved.optimizer)
                rising = {i for i in rising if rates[i] >= peaks[i]}
                last = step if any(rates[i] > peaks[i] for i in rising) else last
                peaks |= {i: rates[i] for i in rising}
                if step == steps:
                    rising = {i for i in rising if peaks[i] > 0}
        except Exception:  # of a scheduler that is at its end, or that waits for a loss
            pass
    for i in rising:
        if step - last < STILL or math.isinf(peaks[i]):  # a long warm-up, or a search for a rate
            group = optimizer.param_groups[i]
            peaks[i] = min(peaks[i], float(group.get("max_lr", group["initial_lr"])))
    return {i: peak for i, peak in peaks.items() if peak > start[i] * (1 + 1e-6)}


def _rates(optimizer: Optimizer) -> dict[int, float]:
    groups = enumerate(optimizer.param_groups)
    return {i: float(group["lr"]) for i, group in groups if "initial_lr" in group}


def _schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the torch schedulers that hold this optimizer, wherever they are kept.

    Those that are parts of another one are left out: it says when they step.
    """
    holders = gc.get_referrers(optimizer)
    attributes = [x for x in holders if isinstance(x, dict) and x.get("optimizer") is optimizer]
    found = [*holders, *gc.get_referrers(*attributes)]
    kept = [x for x in found if isinstance(x, LRScheduler) and x.optimizer is optimizer]
    parts = {id(part) for x in kept for part in getattr(x, "_schedulers", ())}
    return list({id(x): x for x in kept if id(x) not in parts}.values())
