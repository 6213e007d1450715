"""Observation of which parameters and inputs take part in training."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Wiring

LOOKED = 32  # most forward passes that decide on which parameters the loss depends


class Gradients:
    """Records which parameters of a fork receive gradients, and which modules run in which order.

    Attributes:
        ran: Paths of the modules that hold parameters, in the order in which they first ran.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._named = dict(fork.model.named_parameters())
        self._unreached = {name for name, p in self._named.items() if p.requires_grad}
        self._zero = set(self._unreached)
        self.ran: dict[str, None] = {}
        self._handles = [
            module.register_forward_pre_hook(partial(self._note, path))
            for path, module in fork.model.named_modules()
            if any(p is not None for p in module._parameters.values())
        ]

    def _note(self, path: str, module: nn.Module, args: Any) -> None:
        self.ran.setdefault(path)

    def look(self) -> None:
        """Inspect the complete gradients of a step."""
        for name in sorted(self._zero):
            gradient = self._named[name].grad
            if gradient is not None:
                self._unreached.discard(name)
                dense = gradient.coalesce().values() if gradient.is_sparse else gradient
                if bool(dense.any()):
                    self._zero.discard(name)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def wiring(self, copies: Sequence[str]) -> Wiring:
        """Return the observed wiring; copies of a trained part are meant to be frozen."""
        inside = tuple(f"{name}." for name in copies)
        held_ones = set(map(id, held(self._fork.optimizer)))
        trainable = [name for name, p in self._named.items() if p.requires_grad]
        reached = [name for name in trainable if name not in self._unreached]
        return Wiring(
            not_held=tuple(n for n in reached if id(self._named[n]) not in held_ones),
            unreached=tuple(n for n in trainable if n in self._unreached),
            zero_gradient=tuple(n for n in reached if n in self._zero),
            frozen=tuple(n for n, p in self._named.items()
                         if not p.requires_grad and not n.startswith(inside)),
        )  # fmt: skip


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
