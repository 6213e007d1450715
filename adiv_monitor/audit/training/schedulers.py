"""Schedulers of an optimizer, and learning rates that they raise from zero."""

import copy
import gc
import warnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def lifted(optimizer: Optimizer, steps: int) -> set[int]:
    """Return the groups whose learning rate of 0 a scheduler raises within the steps.

    A warm-up does so. A copy of the scheduler is stepped.
    """
    groups = optimizer.param_groups
    zero = {i for i, group in enumerate(groups) if group.get("lr") == 0 and "initial_lr" in group}
    found: set[int] = set()
    for scheduler in _schedulers(optimizer) if zero else []:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the scheduler steps before the optimizer does
            moved = copy.deepcopy(scheduler)
            for _ in range(steps):
                moved.step()
                found |= {i for i in zero if moved.optimizer.param_groups[i]["lr"] > 0}
    return found


def _schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the torch schedulers that hold this optimizer, wherever they are kept."""
    holders = gc.get_referrers(optimizer)
    attributes = [x for x in holders if isinstance(x, dict) and x.get("optimizer") is optimizer]
    found = [*holders, *(gc.get_referrers(*attributes) if attributes else ())]
    kept = [x for x in found if isinstance(x, LRScheduler) and x.optimizer is optimizer]
    return list({id(x): x for x in kept}.values())
