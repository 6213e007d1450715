"""Losses that are no measure: the network, or what training keeps, makes targets and samples."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adiv_monitor import audit
from adiv_monitor.audit.experiments.measure import moving_targets
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return states, next states and rewards, or two views and labels."""
    chance = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 4, generator=chance), torch.randn(32, 4, generator=chance),
         torch.rand(32, generator=chance)) for _ in range(count)
    ]  # fmt: skip


class Net(nn.Module):
    """A network with a copy of itself that a loss may move, and a memory that it may fill."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1),
                                 nn.Linear(16, 3))  # fmt: skip
        self.other = copy.deepcopy(self.own).requires_grad_(requires_grad=False)
        self.register_buffer("memory", torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.own(x)
        return found


def values(model: Net, batch: Any) -> Tensor:
    targets = batch[2] + 0.9 * model(batch[1]).amax(1).detach()
    return F.mse_loss(model(batch[0])[:, 0], targets)


def teacher(model: Net, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), model.other(batch[1]).softmax(1))


def following_teacher(model: Net, batch: Any) -> Tensor:
    with torch.no_grad():
        for p, q in zip(model.other.parameters(), model.own.parameters(), strict=True):
            p.lerp_(q, 0.1)
    return teacher(model, batch)


def memory(model: Net, batch: Any) -> Tensor:
    logits = model(batch[0]) @ model.memory.clone().T
    with torch.no_grad():
        model.memory.copy_(torch.cat([model.memory[1:], model(batch[1]).mean(0, keepdim=True)]))
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def drawn(model: Net, batch: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=model(batch[0]))
    actions = policy.sample()
    return -(policy.log_prob(actions) * batch[1].gather(1, actions[:, None])[:, 0]).mean()


def penalised(model: Net, batch: Any) -> Tensor:
    weights = sum(p.square().sum() for p in model.own.parameters())
    noise = torch.normal(batch[0], 0.1)
    found: Tensor = F.mse_loss(model(noise)[:, 0], batch[2]) + 0.01 * weights
    return found


@pytest.mark.parametrize(
    ("loss", "moves"),
    [(values, True), (following_teacher, True), (memory, True), (drawn, True), (penalised, False)],
)
def test_targets_and_samples_of_the_network_move(loss: Callable[..., Tensor], moves: bool) -> None:
    of = Setup(Net(), adam, loss, tuple(batches()), steps=8)
    trained = of.fork()
    train(trained)
    before = [p.clone() for p in trained.model.parameters()]
    assert moving_targets(of, trained) is moves
    assert all(map(torch.equal, before, trained.model.parameters()))


def test_nothing_is_judged_by_a_loss_whose_targets_move() -> None:
    """It rises: values grow from 0 to the sum of later rewards."""
    report = audit(Net(), batches(), loss=values, optimizer=adam, steps=30)
    assert report.record.moving_targets and not report.record.rates
    assert report.record.overfit is None
    names = {"rate-too-high", "rate-too-low", "cannot-overfit", "loss-stuck"}
    assert not names & {finding.name for finding in report.findings}
    assert not [finding.name for finding in report.findings if finding.strength == "act"]
    assert any("same outputs changes" in note for note in report.record.notes)
