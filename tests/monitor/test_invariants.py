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
    assert monitor.latest is not None
    return monitor.latest


@pytest.mark.parametrize("max_rows", [None, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_plain_sgd_does_what_the_gradient_says(
    case: str, micro_batches: int, max_rows: int | None
) -> None:
    """Under SGD, d/η = M G: the cosines agree, and the effective learning rate is η⟨e, G⟩/‖G‖²."""
    model = CASES[case].model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    report = measured(model, CASES[case].batches(micro_batches), sgd, max_rows=max_rows)
    for reading in report.layers.values():
        assert reading.update_cosine == pytest.approx(reading.gradient_cosine, **EXACT)
        assert reading.parameter_cosine == pytest.approx(1, **EXACT)
        assert reading.projection_cosine == pytest.approx(1, **EXACT)


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


def test_tied_weights_share_the_descent() -> None:
    """Each layer with the tied weight reports its own part; the sum is still −⟨∇L, Δθ⟩."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    report = measured(model, [batch], sgd)
    whole = sum(reading.descent for reading in report.layers.values())
    squares = sum(p.grad.square().sum().item() for p in model.parameters())
    assert whole == pytest.approx(0.1 * squares, **EXACT)
    assert report.coverage == 1.0


class Noisy(nn.Module):
    """A model with dropout, BatchNorm and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).mean((2, 3)), 0.3, self.training)
        for _ in range(3):
            hidden = nn.functional.dropout(self.again(hidden).relu_(), 0.1, self.training)
        return self.head(hidden)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_monitored_run_is_bit_identical(optimizer: type[torch.optim.Optimizer]) -> None:
    """Weights, losses, buffers and random streams equal the plain run's over 20 measured steps."""

    def run(monitored: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model = Noisy()
        own = optimizer(model.parameters(), lr=0.05)
        monitor = Monitor(
            model, own, every_n_steps=1, max_rows=7, attainable=True, on_error="raise"
        )
        if monitored:
            monitor.attach()
        else:
            monitor.close()
        losses = []
        for _ in range(20):
            x, y = torch.randn(5, 3, 6, 6), torch.randint(4, (5,))
            own.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
            losses.append(loss.item())
        monitor.close()
        assert len(monitor.reports) == (20 if monitored else 0)
        return losses, model.state_dict(), torch.get_rng_state()

    (losses, state, random), (plain_losses, plain_state, plain_random) = run(True), run(False)
    assert losses == plain_losses
    assert torch.equal(random, plain_random)
    for name, tensor in state.items():
        assert torch.equal(tensor, plain_state[name]), name
