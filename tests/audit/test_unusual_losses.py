"""Audits of correct programs whose losses do more than compare an output with a target."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import audit
from adiv_monitor.audit import AuditReport


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def reported(
    model: nn.Module, batches: list[Any], loss: Callable[..., Tensor] | None
) -> AuditReport:
    report = audit(model, batches, loss=loss, optimizer=adam, steps=6, try_fixes=False)
    assert len(report.record.losses) == 6
    assert all(map(math.isfinite, report.record.losses))
    assert [finding.name for finding in report.findings if finding.strength == "act"] == []
    return report


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def test_a_gradient_penalty() -> None:
    """The critic of a WGAN: its loss differentiates with respect to its input."""
    critic = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        between = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        found: Tensor = model(fake).mean() - model(real).mean() + 10 * penalty
        return found

    chance = drawn()
    batches = [
        (torch.randn(16, 5, generator=chance) + 1, torch.randn(16, 5, generator=chance))
        for _ in range(3)
    ]
    reported(critic, batches, loss)


def test_a_differential_equation() -> None:
    """A physics-informed network: u' = −u, u(0) = 1."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        t = batch[0].clone().requires_grad_()
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        found: Tensor = (du + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
        return found

    reported(model, [(torch.rand(32, 1, generator=drawn()),)], loss)


class OwnLoss(nn.Module):
    """Returns a plain dict, as many training frameworks do."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.net = key, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {self.key: nn.functional.cross_entropy(self.net(x), y)}


def test_a_model_that_returns_a_dict_has_its_loss_in_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 4, generator=drawn())
    data = [(x, x[:, :3].argmax(1))]
    reported(OwnLoss("loss"), data, None)
    expected = "gave dict, expected a model that gives its own loss, as the `loss`"
    with pytest.raises(TypeError, match=expected):
        audit(OwnLoss("nll"), data, steps=2)
