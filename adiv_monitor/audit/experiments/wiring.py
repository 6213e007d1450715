"""On which parameters the loss does not depend at all."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, seeded

LOOKED = 32  # most forward passes that decide on which parameters the loss depends


@torch.no_grad()
def unused(fork: Fork, batch: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, out of `names`, that the loss of a batch does not depend on at all.

    Normal noise of their own rms, but at least 0.1, is added to all of them; if the loss changes,
    to each half of them, and so on. Parameters that the limit of passes leaves undecided are not
    returned.
    """
    loss, parameters = RepeatedLoss(fork), dict(fork.model.named_parameters())
    as_it_is = loss.of(batch)
    found: set[str] = set()
    groups = [list(names)]
    for _ in range(LOOKED):
        if not groups or not groups[0]:
            break
        group = groups.pop(0)
        before = [parameters[name].clone() for name in group]
        with seeded(fork.seed):
            for name, p in zip(group, before, strict=True):
                rms = max(float(p.float().square().mean().sqrt()), 0.1)
                parameters[name].add_(rms * torch.randn_like(p))
        if math.isclose(loss.of(batch), as_it_is, rel_tol=1e-6):
            found.update(group)
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        for name, p in zip(group, before, strict=True):
            parameters[name].copy_(p)
    return tuple(name for name in names if name in found)
