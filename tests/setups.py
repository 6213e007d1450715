"""One measured step of a small model, the comparison of readings, and a free port."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, loss_of
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport

EXACT = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}


LOOSELY = {"rel": 1e-5, "abs": 1e-9, "nan_ok": True}


def same(a: StepReport, b: StepReport, *, but: tuple[str, ...] = (), loosely: bool = False) -> None:
    assert a.layers.keys() == b.layers.keys()
    for path, reading in a.layers.items():
        expected = b.layers[path].measures()
        assert reading.measures().keys() == expected.keys()
        for name, value in reading.measures().items():
            if name not in but:
                assert value == pytest.approx(expected[name], **(LOOSELY if loosely else EXACT)), (
                    f"{name} of '{path}'"
                )


def one_step(
    model: nn.Module,
    backward: Callable[[nn.Module], None],
    between: Callable[[nn.Module], None] = lambda model: None,
    **options: object,
) -> StepReport:
    """Take a measured SGD step, calling `between` after the backward pass; return its report."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise", **options) as monitor:
        backward(model)
        between(model)
        optimizer.step()
    assert monitor.latest is not None
    return monitor.latest


def trained(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    steps: int = 1,
    /,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    between: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> list[StepReport]:
    """Train, by SGD if there is no optimizer, and return the reports; every step is measured.

    Args:
        model: the model.
        loss: computes the loss of the next step.
        steps: their number.
        optimizer: of the model.
        between: called between the backward pass and the optimizer's step, with the step's number.
        after: called after each step.
        options: those of the monitor.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every_n_steps": 1, "on_error": "raise", **options}
    with Monitor(model, optimizer, **options) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            between(step)
            optimizer.step()
            after(step)
    return list(monitor.reports)


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model and a batch, each time the same."""
    return CASES["mlp"].model(), CASES["mlp"].batches(1, size=6)[0]


def plain_step(**options: object) -> StepReport:
    """Take a measured SGD step of that model on that batch."""
    model, batch = mlp()
    return one_step(model, lambda m: loss_of(m, batch).backward(), **options)


def cosine(a: Tensor, b: Tensor) -> float:
    return ((a * b).sum() / a.norm() / b.norm()).item()


def equal(a: Any, b: Any) -> bool:
    """Return equality to the last bit, with equal types and orders at every level; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (a != a and b != b)


def leaves(record: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays in a record of numbers, each with the dotted names of its fields."""
    if is_dataclass(record):
        for f in fields(record):
            yield from leaves(getattr(record, f.name), f"{name}.{f.name}" if name else f.name)
    elif isinstance(record, dict | tuple):
        for part in record.values() if isinstance(record, dict) else record:
            yield from leaves(part, name)
    elif hasattr(record, "dtype"):
        yield name, record
