"""Nested tensors: layers that get them are refused, and the run is unchanged."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computes import Computes
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.features import DenseFeatures, register_features, registry

LENGTHS = (3, 5, 1)


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


@pytest.fixture(autouse=True)
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", {})
    register_features(Doubled)(lambda module, rows, x: DenseFeatures(rows.take(2 * x)[:, None], 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3)).double(),
    "module's rule": lambda: Doubled(4, 3).double(),
    "no rule": lambda: Computes(
        lambda model, x: Hidden.apply(x, model.weight), weight=nn.Parameter(torch.ones(4).double())
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_they_are_refused_and_the_run_is_what_it_is_without_a_monitor(
    kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    x = torch.randn(sum(LENGTHS), 4, dtype=torch.float64).split(LENGTHS)
    nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    plain = nn.Sequential(MODELS[kind]())
    model = copy.deepcopy(plain)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model(nested).values().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, every_n_steps=1, max_rows=4) as monitor:
        train(model, optimizer)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    report = monitor.latest
    assert report is not None and not report.layers and report.unsupported
    assert all("nested tensors" in why for why in report.unsupported.values())
    assert not [w for w in recwarn if "adiv_monitor" in str(w.message)]
