"""What is audited, and forks of it: copies that train on the same batches by the same chance."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[[nn.Module], Optimizer]


@dataclass
class Fork:
    """A copy that is trained: mends change it before it runs.

    Attributes:
        model: the copy.
        optimizer: over the copy's parameters.
        loss: model, batch → scalar.
        batches: one of each step.
        clip_norm: largest norm of the gradient; None: not clipped.
        seed: of the run's random numbers.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    batches: list[Any]
    clip_norm: float | None
    seed: int


@dataclass(frozen=True)
class Setup:
    """All that a run is made of. The model is never trained; its forks are.

    Attributes:
        model: the model as it was given.
        optimizer: one over its parameters, or what makes one for a model.
        loss: model, batch → scalar.
        batches: the batches that there are, on the model's device.
        steps: steps to train; batches are repeated if there are fewer.
        clip_norm: largest norm of the gradient; None: not clipped.
        seed: of the run's random numbers.
    """

    model: nn.Module
    optimizer: Optimizer | OptimizerFactory
    loss: Loss
    batches: tuple[Any, ...] = field(repr=False)
    steps: int
    clip_norm: float | None = None
    seed: int = 0

    def fork(self) -> Fork:
        """A copy, with an optimizer of its own, as they were given."""
        if isinstance(self.optimizer, Optimizer):
            model, optimizer = copy.deepcopy((self.model, self.optimizer))
        else:
            model = copy.deepcopy(self.model)
            optimizer = self.optimizer(model)
        batches = list(itertools.islice(itertools.cycle(self.batches), self.steps))
        return Fork(model, optimizer, self.loss, batches, self.clip_norm, self.seed)


def taken(batches: Iterable[Any], steps: int) -> tuple[Any, ...]:
    """The first batches, as many as there are steps at most.

    Raises:
        ValueError: there is none.
    """
    found = tuple(itertools.islice(batches, steps))
    if not found:
        raise ValueError("audit(batches=…): got no batch, expected at least one")
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with torch's random numbers begun at `seed`; afterwards they are as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
