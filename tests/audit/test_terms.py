"""Terms of the loss: those without a gradient, and those whose gradients are opposed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from trial_setups import answer, loss, setup

from adiv_monitor.diagnosis.faults.loss import AGAINST
from adiv_monitor.diagnosis.record import Fact


def asked(name: str, of: Callable[..., Tensor], **changes: Any) -> tuple[Fact, ...]:
    bed = setup(loss=of, **changes)
    found = answer(name, bed, bed.fork())
    assert not found.untold
    return found.facts


def size(model: nn.Module) -> Tensor:
    return torch.stack([p.square().mean() for p in model.parameters()]).sum()


def slope(model: nn.Module, batch: Any, graph: bool) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=graph)
    return (g.norm(dim=1) - 1).square().mean()


def accumulated(model: nn.Module, batch: Any) -> Tensor:
    total = loss(model, batch)
    total += 0.1 * size(model).detach()
    return total / 2


@pytest.mark.parametrize(
    "of",
    [
        lambda m, b: loss(m, b) + 10 * slope(m, b, graph=False),
        lambda m, b: loss(m, b) - size(m).item(),
        accumulated,
    ],
)
def test_a_term_that_lost_its_graph_is_told(of: Callable[..., Tensor]) -> None:
    (fact,) = asked("term-without-graph", of)
    assert "test_terms.py" in fact.place
    assert fact.numbers["value"] and fact.numbers["value"] != fact.numbers["loss"]


@pytest.mark.parametrize(
    "of",
    [
        loss,
        lambda m, b: loss(m, b) + 10 * slope(m, b, graph=True),
        lambda m, b: loss(m, b) + 3.0 + b[0].square().mean(),
        lambda m, b: loss(m, b).detach() + size(m) - size(m).detach(),
    ],
    ids=["one term", "graph", "constants", "straight-through"],
)
def test_constants_and_targets_are_no_terms_without_a_graph(of: Callable[..., Tensor]) -> None:
    assert not asked("term-without-graph", of)


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.told = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.made(z)


def real(logits: Tensor, label: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def players(joint: bool) -> Callable[..., Tensor]:
    """Both players' losses in one, where each trains its own player or both."""

    def of(model: Any, batch: Any) -> Tensor:
        made = model(torch.randn(len(batch[0]), 4))
        fixed = {name: p.detach() for name, p in model.told.named_parameters()}
        own = model.told(made) if joint else torch.func.functional_call(model.told, fixed, (made,))
        other = model.told(made if joint else made.detach())
        return real(model.told(batch[0]), 1.0) + real(other, 0.0) + real(own, 1.0)

    return of


def critic(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return model(torch.randn_like(x)).mean() - model(x).mean()


def test_terms_that_cancel_are_told() -> None:
    (fact,) = asked("terms-opposed", players(joint=True), model=Players())
    assert fact.numbers["largest"] < AGAINST < -0.9
    assert fact.numbers["ratio"] > 0.5
    (fact,) = asked("terms-opposed", lambda m, b: loss(m, b) + (2 - loss(m, b)))
    assert fact.numbers["cosine"] == pytest.approx(-1)
    assert fact.numbers["ratio"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (players(joint=False), {"model": Players()}),
        (critic, {}),
        (lambda m, b: loss(m, b) + 0.1 * size(m), {}),
    ],
    ids=["players", "critic", "penalty"],
)
def test_terms_that_only_pull_apart_are_not_opposed(of: Any, changes: dict[str, Any]) -> None:
    facts = asked("terms-opposed", of, **changes)
    assert not facts or facts[0].numbers["largest"] > AGAINST + 0.1
