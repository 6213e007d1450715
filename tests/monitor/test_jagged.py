"""Jagged nested tensors: their packed rows are measured, or a reason is reported."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from setups import same
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport
from adiv_monitor.features import DenseFeatures, register_features, registry

LENGTHS = (3, 5, 1)


def jagged(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def packed(model: nn.Module) -> Tensor:
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Embedding):
        return torch.arange(sum(LENGTHS)) % 5
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(LENGTHS), 4, generator=generator, dtype=torch.float64)


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Doubled(nn.Linear):
    """A layer whose rule supports dense tensors only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(2 * x, self.weight, self.bias)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, (gradient * x).values().sum(0)


class Bent(Multiplied):
    """A layer without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.weight)


@pytest.fixture(autouse=True)
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})
    register_features(Doubled)(lambda module, rows, x: DenseFeatures(rows.take(2 * x)[:, None], 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3).double(),
    "mlp": lambda: nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)
    ).double(),
    "tokens": lambda: nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double(),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "product": (Multiplied, "torch's mul"),
    "module's rule": (lambda: Doubled(4, 3).double(), "its rule"),
    "no rule": (Bent, "as a whole"),
}


def trained(
    model: nn.Module, x: Tensor, steps: int = 2, **options: Any
) -> tuple[StepReport | None, list[Tensor], list[Tensor]]:
    """Train some steps; return the last report, if monitored, the losses and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer, every_n_steps=1, **options) if options else None
    if monitor is not None:
        monitor.attach()
    losses = []
    for _ in range(steps):
        z = model(x)
        loss = (z.values() if z.is_nested else z).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if monitor is not None:
        monitor.close()
    return None if monitor is None else monitor.latest, losses, list(model.parameters())


@pytest.mark.parametrize("max_rows", [4, None])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_those_that_are_packed(kind: str, max_rows: int | None) -> None:
    model = MODELS[kind]()
    x = packed(model)
    options: dict[str, Any] = {"max_rows": max_rows, "on_error": "raise", "realised": True}
    expected = trained(copy.deepcopy(model), x, **options)[0]
    found = trained(model, jagged(x.split(LENGTHS)), **options)[0]
    assert found is not None
    assert expected is not None
    assert found.layers
    assert not found.unsupported
    same(found, expected)
    for reading in found.layers.values():
        assert reading.rows_total == sum(LENGTHS)


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_they_are_measured_where_plain_hooks_suffice(kind: str, steps: int) -> None:
    """From the third measured step on, functions that are known are not watched any more."""
    model = MODELS[kind]()
    x = packed(model)
    options: dict[str, Any] = {"steps": steps, "on_error": "raise", "max_rows": None}
    expected = trained(copy.deepcopy(model), x, **options)[0]
    found = trained(model, jagged(x.split(LENGTHS)), **options)[0]
    assert found is not None
    assert found.layers
    same(found, expected)


@pytest.mark.parametrize("kind", [*MODELS, *REFUSED])
def test_the_run_is_what_it_is_without_a_monitor(kind: str) -> None:
    model = MODELS[kind]() if kind in MODELS else REFUSED[kind][0]()
    x = jagged(packed(model).split(LENGTHS))
    _, losses, weights = trained(copy.deepcopy(model), x)
    _, watched_losses, watched_weights = trained(model, x, max_rows=4)
    for plain, watched in zip(losses + weights, watched_losses + watched_weights, strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_measured_says_why(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    make, who = REFUSED[kind]
    model = nn.Sequential(make())
    report = trained(model, jagged(packed(model).split(LENGTHS)), max_rows=4)[0]
    assert report is not None
    assert not report.layers
    assert list(report.unsupported) == ["0"]
    assert "nested tensor" in report.unsupported["0"]
    assert who in report.unsupported["0"]
    assert not [w for w in recwarn if "adiv_monitor" in str(w.message)]
