"""Observation of which parameters and inputs take part in training."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
        self.ran: list[str] = []
        self._handles: dict[str, RemovableHandle] = {
            path: module.register_forward_pre_hook(self._noted(path))
            for path, module in fork.model.named_modules()
            if _holds_any(module)
        }

    def look(self) -> None:
        """Inspect the complete gradients of a step."""
        for name in sorted(self._zero):
            gradient = self._named[name].grad
            if gradient is None:
                continue
            self._unreached.discard(name)
            dense = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool(dense.any()):
                self._zero.discard(name)

    def remove(self) -> None:
        """Remove the hooks from the modules that never ran."""
        for handle in self._handles.values():
            handle.remove()

    def wiring(self, input_matters: float) -> Wiring:
        """Return the observed wiring, with the given sensitivity to the inputs."""
        held_ones = set(map(id, held(self._fork.optimizer)))
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        reached = [name for name in trainable if name not in self._unreached]
        unreached = [name for name in trainable if name in self._unreached]
        return Wiring(
            not_held=tuple(n for n in reached if id(trainable[n]) not in held_ones),
            unreached=tuple(unreached),
            zero_gradient=tuple(n for n in reached if n in self._zero),
            frozen=tuple(n for n, p in self._named.items() if not p.requires_grad),
            input_matters=input_matters,
        )

    def _noted(self, path: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            self.ran.append(path)
            self._handles.pop(path).remove()

        return note


def _holds_any(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def unused(fork: Fork, batch: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, out of `names`, that the loss of a batch does not depend on at all.

    Noise of the parameters' own scale is added to all of them; if the loss changes, to each half of
    them, and so on. Parameters that the limit of passes leaves undecided are not returned.
    """
    loss, parameters = RepeatedLoss(fork), dict(fork.model.named_parameters())
    as_it_is = loss.of(batch)
    found: set[str] = set()
    groups = [list(names)] if names else []
    for _ in range(LOOKED):
        if not groups:
            break
        group = groups.pop(0)
        with _noisy([parameters[name] for name in group], fork.seed):
            is_same = math.isclose(loss.of(batch), as_it_is, rel_tol=1e-6)
        if is_same:
            found.update(group)
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return tuple(name for name in names if name in found)


@contextmanager
def _noisy(parameters: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Add normal noise to the parameters inside the context, of their own rms but at least 0.1."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad(), seeded(seed):
        for parameter in parameters:
            rms = float(parameter.float().square().mean().sqrt())
            parameter.add_(max(rms, 0.1) * torch.randn_like(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)
