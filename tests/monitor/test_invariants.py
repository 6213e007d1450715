"""Invariants implied by the definitions of the measures, one test each; float64."""

import copy

import pytest
import torch
from cases import CASES, loss_of
from torch import nn

from adiv_monitor import Monitor, StepReport

EXACT = {"rel": 1e-10, "abs": 1e-12, "nan_ok": True}


def measured(
    model: nn.Module, batches: list, optimizer: torch.optim.Optimizer, **options
) -> StepReport:
    with Monitor(model, optimizer, on_error="raise", **options) as monitor:
        for batch in batches:
            loss_of(model, batch).backward()
        optimizer.step()
    return monitor.latest


def test_a_long_bias_carries_its_share_in_every_step() -> None:
    """The products of a long bias with the gradient replace those of its difference."""
    model, x = nn.Linear(2, 9000).double(), torch.randn(3, 2, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, sgd, every_n_steps=1, on_error="raise") as monitor:
        for _ in range(3):
            weight, bias = (p.detach().clone() for p in model.parameters())
            sgd.zero_grad()
            model(x).sin().square().sum().backward()
            sgd.step()
            of_weight = (x @ (weight - model.weight.detach()).T).norm()
            of_bias = (bias - model.bias.detach()).norm() * 3**0.5
            share = float(of_bias / (of_weight + of_bias))
            model(x)  # the next forward pass completes the report
            assert monitor.latest.layers[""].bias_share == pytest.approx(share, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_descent_is_the_change_of_the_loss(case: str) -> None:
    """Summed over layers, descent = −⟨∇L, Δθ⟩, and the loss falls by that up to O(η²)."""
    errors = []
    for lr in (1e-3, 1e-4):
        model = CASES[case].model()
        batch = CASES[case].batches(1)[0]
        before = loss_of(copy.deepcopy(model), batch).item()
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        report = measured(model, [batch], sgd)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = sum(reading.descent for reading in report.layers.values())
        assert whole == pytest.approx(lr * sum(g.square().sum().item() for g in gradients), **EXACT)
        errors.append(abs(before - loss_of(model, batch).item() - whole))
    assert errors[1] < errors[0] / 50  # a hundred times smaller at a tenth of the learning rate
