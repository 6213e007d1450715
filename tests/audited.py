"""Small models, batches and observed runs for the tests of the audit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments import observe
from adiv_monitor.audit.run import adamw
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.diagnosis.record import Record

Batch = tuple[Tensor, Tensor]


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), *between, nn.Linear(12, 3))


def batches(count: int = 4, size: int = 10, features: tuple[int, ...] = (6,)) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, *features, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(rate: float = 0.1, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, **settings)


def unasked() -> AbstractContextManager[object]:
    """Audits ask no questions about copies, which take longer than all else."""
    return mock.patch.object(observe, "asked", lambda *_, **__: {})


def seen(model: nn.Module, data: list[Any] | None = None, **given: Any) -> Record:
    """Observe one run and return its record; no questions about copies are asked."""
    setup = {"optimizer": adamw, "loss": cross_entropy, "steps": 6, **given}
    every = setup.pop("every_n_steps", 2)
    of = Setup(model, batches=tuple(batches() if data is None else data), **setup)
    with unasked():
        return observe.observe(of, every_n_steps=every)
