"""Sizes: each number against its definition in plain tensors, however the gradient came about."""

import math

import pytest
import torch
from computes import Computes
from function_cases import grouped_mm
from setups import trained
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport

SCALE, LIMIT, RATE = 2.0**12, 0.05, 0.1
LOSS = nn.CrossEntropyLoss()


class Tied(nn.Module):
    """Layers of several kinds; the embedding's table is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.conv, self.gate = nn.Conv1d(4, 4, 3, padding=1), nn.PReLU(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.gate(self.conv(self.norm(self.table(tokens)).transpose(1, 2)))
        return self.head(mixed.transpose(1, 2)).transpose(1, 2)


class Step:
    """One measured step, and what a plain loop sees of it.

    Attributes:
        gamma, before, after: by parameter, the gradient that the optimizer saw, and the weights.
        clip: the factor by which the gradient was clipped.
        raw: norm of the gradient before that.
    """

    def __init__(self, way: str, *, knows_loss: bool = True) -> None:
        torch.manual_seed(0)
        model, tokens = Tied().double(), torch.randint(7, (6, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled="amp" in way)
        parts = tokens.split(2) if "micro" in way else [tokens]
        with Monitor(model, optimizer, loss=LOSS if knows_loss else None, on_error="raise") as own:
            for part in parts:
                scaler.scale(LOSS(model(part), part) / len(parts)).backward()
            scaler.unscale_(optimizer)
            limit = LIMIT if "clip" in way else math.inf
            self.raw = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
            self.clip = min(1.0, LIMIT / self.raw) if "clip" in way else 1.0
            named = dict(model.named_parameters())
            self.gamma = {name: p.grad.clone() for name, p in named.items()}
            self.before = {name: p.detach().clone() for name, p in named.items()}
            scaler.step(optimizer)
            self.after = {name: p.detach().clone() for name, p in named.items()}
        self.report: StepReport = own.latest


def whole(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors.values()])


WAYS = ["plain", "micro", "clip", "amp", "amp-micro-clip"]


@pytest.fixture(scope="module", params=WAYS)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def test_norms_of_the_step_count_each_parameter_once(step: Step) -> None:
    report = step.report
    assert report.gradient_norm == pytest.approx(whole(step.gamma).norm().item())
    assert report.unclipped_gradient_norm == pytest.approx(step.raw, rel=1e-4)
    update = whole(step.after) - whole(step.before)
    assert report.update_norm == pytest.approx(update.norm().item())
    assert report.clipped_share == (step.clip < 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_scale_is_told_from_clipping_where_the_loss_is_known(way: str) -> None:
    report = Step(way, knows_loss=False).report
    expected = None if "amp" in way else Step(way).raw
    assert report.unclipped_gradient_norm == (expected and pytest.approx(expected, rel=1e-4))


def test_weights_that_rounding_keeps_are_counted() -> None:
    model = nn.Linear(64, 8, bias=False).bfloat16()
    before = model.weight.detach().clone()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=3e-3), torch.randn(16, 64).bfloat16()
    (report,) = trained(model, lambda model: model(x).square().mean(), optimizer=optimizer)
    expected = (model.weight == before)[model.weight.grad != 0].double().mean().item()
    assert 0.1 < expected < 0.999
    assert report.layers[""].unchanged_share == pytest.approx(expected)


def test_rows_of_experts_are_counted_over_all_rows_and_micro_batches() -> None:
    torch.manual_seed(0)
    """Four experts are in one weight, and each batch says how many rows they get."""
    experts = nn.Parameter(torch.randn(4, 3, 2, dtype=torch.float64))
    model = Computes(lambda m, x, ends: grouped_mm(x, m.experts, offs=ends), experts=experts)
    loads = torch.tensor([[20, 0, 30, 10], [5, 0, 55, 0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, max_rows=8, on_error="raise") as monitor:
        for of in loads:
            x = torch.randn(60, 3, dtype=torch.float64)
            model(x, of.cumsum(0).int()).square().mean().backward()
        optimizer.step()
    [reading] = monitor.latest.layers.values()
    rows = loads.sum(0).double()
    assert reading.expert_load_max == pytest.approx((rows.max() / rows.mean()).item())
    assert reading.expert_load_cv == pytest.approx((rows.std(correction=0) / rows.mean()).item())
    assert reading.idle_expert_share == 0.25
