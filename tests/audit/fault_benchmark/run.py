"""A case of the fault benchmark: a training run, how it is built, and what is planted in it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.audit.training.setup import Loss, Setup, seeded

STEPS = 60  # of an audit
LONGER = 3 * STEPS  # of a run that judges its advice
BATCHES = LONGER + 20  # the last ones are for judging a trained model


def parameters(model: nn.Module) -> Iterable[Any]:
    return model.parameters()


@dataclass
class Run:
    """A training run that has not begun; a fault is planted by changing it.

    Attributes:
        model: what is trained.
        batches: one of each step, and some more; pairs of inputs and targets.
        loss: model, batch → scalar.
        algorithm: the optimizer's class.
        settings: of the optimizer.
        held: model → what the optimizer is given.
        clip_norm: largest norm of the gradient; None: not clipped.
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss
    algorithm: type[Optimizer]
    settings: dict[str, Any]
    held: Callable[[nn.Module], Iterable[Any]] = parameters
    clip_norm: float | None = None

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.algorithm(self.held(model), **self.settings)

    def setup(self, steps: int, seed: int) -> Setup:
        batches = tuple(self.batches[:steps])
        return Setup(self.model, self.optimizer, self.loss, batches, steps, self.clip_norm, seed)


@dataclass(frozen=True)
class Healthy:
    """A run that trains as well as it can.

    Attributes:
        name: of the run.
        kind: of the network: "MLP", "CNN", "transformer", …
        make: builds it from the global random numbers.
    """

    name: str
    kind: str
    make: Callable[[], Run]

    def build(self, seed: int) -> Run:
        with seeded(seed):
            return self.make()


@dataclass(frozen=True)
class Case:
    """A healthy run with one fault planted in it.

    Attributes:
        name: of the case.
        twin: the run without the fault.
        expected: names of findings that are right, the planted fault first.
        plant: changes the run, in place.
        because: why more than one name is right.
        source: which public fault it is written after.
        judged_by: "loss", or "error" where the fault changes what the loss means.
    """

    name: str
    twin: Healthy
    expected: Sequence[str]
    plant: Callable[[Run], None]
    because: str = ""
    source: str = ""
    judged_by: str = field(default="loss")

    def __post_init__(self) -> None:
        if len(self.expected) > 1 and not self.because:
            raise ValueError(f"{self.name}: several names are right, and no reason is given")

    @property
    def kind(self) -> str:
        return self.twin.kind

    def build(self, seed: int) -> Run:
        run = self.twin.build(seed)
        with seeded(seed):
            self.plant(run)
        return run


def error(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of wrong answers, or of the targets' variance that remains."""
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(inputs).detach() for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    if not outputs.isfinite().all():
        return math.inf
    if targets.dtype.is_floating_point:
        left = (outputs - targets).square().mean()
        return float(left / targets.var(correction=0))
    return float((outputs.argmax(-1) != targets).float().mean())
