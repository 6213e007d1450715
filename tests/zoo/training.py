"""What a model of the zoo is: how it is built and trained, and what of it no monitor can see."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Trained:
    """A model and the optimizer that trains it: what one monitor watches."""

    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True)
class Training:
    """A training run that has not begun.

    Attributes:
        trained: what is trained; more than one where there are several optimizers.
        step: takes one whole training step on fresh data from the global generators, and gives its
            losses.
    """

    trained: Sequence[Trained]
    step: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Specimen:
    """A model of the zoo.

    Attributes:
        title: for tables: model, then what is special about it.
        build: makes the run; equal seeds make equal ones.
        unseen: parameters that can't be measured, by name → why.
        warnings: how third parties' warnings begin that its making or training causes.
    """

    title: str
    build: Callable[[], Training]
    unseen: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def seed(number: int) -> None:
    """Seeds all generators that models and data draw from."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def training(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Training:
    """A model in training mode with AdamW over all that is trainable.

    Args:
        model: the model.
        loss: draws a batch and gives the model's loss on it.
    """
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        return [value.detach()]

    return Training([Trained(model, optimizer)], step)
