"""Sizes: each number against its definition in plain tensors, however the gradient came about."""

import math
from collections import defaultdict

import pytest
import torch
from function_cases import grouped_mm
from torch import Tensor, nn

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks.scalars import board_scalars

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
        z, G: by layer, its outputs and their gradients, row by row.
        gamma, before, after: by parameter, the gradient that the optimizer saw, and the weights.
        clip: the factor by which the gradient was clipped.
        raw: norm of the gradient before that.
    """

    def __init__(self, way: str, *, knows_loss: bool = True) -> None:
        torch.manual_seed(0)
        model, tokens = Tied().double(), torch.randint(7, (6, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled="amp" in way)
        outputs: dict[str, list[Tensor]] = defaultdict(list)
        for name, module in model.named_children():

            def keep(module: nn.Module, args: object, z: Tensor, name: str = name) -> None:
                z.retain_grad()
                outputs[name].append(z)

            module.register_forward_hook(keep)
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
        assert own.latest is not None
        self.report: StepReport = own.latest
        by = self.clip / (SCALE if "amp" in way else 1.0)
        channels = {name: 1 if name in ("conv", "gate") else -1 for name in outputs}

        def rows(name: str, tensors: list[Tensor]) -> Tensor:
            return torch.cat([x.movedim(channels[name], -1).flatten(0, -2) for x in tensors])

        self.z = {name: rows(name, of).detach() for name, of in outputs.items()}
        self.G = {name: rows(name, [z.grad for z in of]) * by for name, of in outputs.items()}


def whole(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors.values()])


WAYS = ["plain", "micro", "clip", "amp", "amp-micro-clip"]


@pytest.fixture(scope="module", params=WAYS)
def step(request: pytest.FixtureRequest) -> Step:
    return Step(request.param)


def test_sizes_of_parameters_are_those_of_plain_tensors(step: Step) -> None:
    move = {name: step.after[name] - step.before[name] for name in step.after}
    owned = {"head": ["table.weight"]}
    for path, reading in step.report.layers.items():
        names = owned.get(path) or [name for name in move if name.startswith(f"{path}.")]
        gamma, u, theta = (
            whole({name: of[name] for name in names}) for of in (step.gamma, move, step.before)
        )
        expected = {
            "gradient_norm": gamma.norm(),
            "update_norm": u.norm(),
            "weight_norm": theta.norm(),
            "weight_update_ratio": u.norm() / theta.norm(),
            "update_rms": u.square().mean().sqrt() / RATE,
            "unchanged_share": (u[gamma != 0] == 0).double().mean(),
        }
        for name, value in expected.items():
            assert getattr(reading, name) == pytest.approx(value.item(), rel=1e-9), (path, name)


def test_sizes_of_activations_are_those_of_plain_tensors(step: Step) -> None:
    for path in ("table", "norm", "conv", "head"):
        reading, z, G = step.report.layers[path], step.z[path], step.G[path]
        expected = {
            "activation_rms": z.square().mean().sqrt(),
            "activation_gradient_rms": G.square().mean().sqrt(),
            "activation_max": z.abs().max(),
            "activation_kurtosis": z.pow(4).mean() / z.square().mean() ** 2,
            "zero_share": (G == 0).double().mean(),
            "silent_share": (G == 0).all(0).double().mean(),
        }
        for name, value in expected.items():
            assert getattr(reading, name) == pytest.approx(value.item(), rel=1e-6), (path, name)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        model(torch.randn(16, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    expected = (model.weight == before)[model.weight.grad != 0].double().mean().item()
    assert 0.1 < expected < 0.999
    assert monitor.latest.layers[""].unchanged_share == pytest.approx(expected)


class Routed(nn.Module):
    """Four experts in one weight, of which each batch says how many rows they get."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 3, 2, dtype=torch.float64))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(x, self.experts, offs=ends)


def test_rows_of_experts_are_counted_over_all_rows_and_micro_batches() -> None:
    torch.manual_seed(0)
    model, loads = Routed(), torch.tensor([[20, 0, 30, 10], [5, 0, 55, 0]])
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


@pytest.mark.parametrize("depth", [3, 40])
def test_a_dashboard_has_fewer_than_60_scalars_at_any_depth(depth: int) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(depth)]
    model, x = nn.Sequential(*layers), torch.randn(8, 4)
    with Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        model(x).square().mean().backward()
        monitor._training.optimizer.step()
    assert len(board_scalars(monitor.latest, None, "few")) < 60
