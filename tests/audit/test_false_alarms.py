"""Healthy trainings that look like faults, or are unusual: the audit names no fault of them."""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from audited import cross_entropy
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import audit
from adiv_monitor.audit.report import AuditReport

Case = tuple[nn.Module, Sequence[Any], Callable[[nn.Module, Any], Tensor] | None]


def mlp(*widths: int) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*[x for a, b in pairs for x in (nn.Linear(a, b), nn.ReLU())][:-1])


def after(function: Callable[[Tensor], Tensor], network: nn.Module) -> nn.Module:
    """Return a network behind a fixed function of its input."""
    return Computes(lambda m, x: m.network(function(x)), network=network)


def squared(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.mse_loss(model(*batch[:-1]), batch[-1])


def blobs(factor: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    centres, labels = torch.randn(6, 16), torch.randint(6, (512,))
    x = factor * (centres[labels] + torch.randn(512, 16))
    return list(zip(x.split(32), labels.split(32), strict=True))


def standardised_in_forward() -> Case:
    batches = blobs(1e3)
    x = torch.cat([batch[0] for batch in batches])
    mean, std = x.mean(0), x.std(0)
    return after(lambda x: (x - mean) / std, mlp(16, 64, 6)), batches, cross_entropy


def batch_norm_first() -> Case:
    return nn.Sequential(nn.BatchNorm1d(16), mlp(16, 64, 6)), blobs(1e3), cross_entropy


def fourier_features() -> Case:
    places, waves = torch.randint(256, (512, 2)).float(), 2 * torch.randn(2, 32)
    targets = torch.sin(places[:, :1] / 40)

    def features(x: Tensor) -> Tensor:
        angles = 6.283 * (x / 256) @ waves
        return torch.cat([angles.sin(), angles.cos()], 1)

    batches = list(zip(places.split(64), targets.split(64), strict=True))
    return after(features, mlp(64, 64, 1)), batches, squared


def adversarial() -> Case:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(model, (x, batch[1])), x)
        return cross_entropy(model, ((x + 0.1 * gradient.sign()).detach(), batch[1]))

    return mlp(16, 64, 6), blobs(), loss


def frozen_reference() -> Case:
    model = nn.ModuleDict({"policy": mlp(16, 32, 6)})
    model["reference"] = copy.deepcopy(model["policy"]).requires_grad_(False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        new, old = (model[name](batch[0]).log_softmax(1) for name in ("policy", "reference"))
        return -functional.logsigmoid((new - old).gather(1, batch[1][:, None])).mean()

    return model, blobs(), loss


class ZeroGates(nn.Module):
    """A residual branch behind a gate that begins at zero, in front of a head that does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.condition = nn.Linear(2, 64), nn.Linear(1, 64)
        self.gates, self.branch, self.head = nn.Linear(64, 192), mlp(64, 128, 64), nn.Linear(64, 2)
        for layer in (self.gates, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift, gate = self.gates(functional.silu(self.condition(time))).chunk(3, 1)
        hidden = self.first(x)
        inner = functional.layer_norm(hidden, (64,)) * (1 + scale) + shift
        found: Tensor = self.head(functional.layer_norm(hidden + gate * self.branch(inner), (64,)))
        return found


def zero_gates() -> Case:
    angles = 6.28 * torch.rand(2560)
    points = 1.4 * torch.stack([angles.cos(), angles.sin()], 1)

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (x,) = batch
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return functional.mse_loss(model((1 - time) * x + time * noise, time), noise - x)

    return ZeroGates(), [(x,) for x in points.split(128)], loss


class Bags(nn.Module):
    """Attention over the instances of one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.scores, self.head = mlp(16, 32, 32), nn.Linear(32, 4), nn.Linear(128, 1)

    def forward(self, bag: Tensor) -> Tensor:
        features = self.features(bag)
        weights = self.scores(features).softmax(0)
        found: Tensor = self.head((weights.T @ features).reshape(1, -1))
        return found


def bags() -> Case:
    sizes = torch.randint(8, 20, (24,)).tolist()
    batches = [(torch.randn(size, 16), torch.tensor([[float(i % 2)]])) for i, size in
               enumerate(sizes)]  # fmt: skip

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return Bags(), batches, loss


def gradient_penalty() -> Case:
    """The critic of a WGAN: its loss differentiates with respect to its input."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        between = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        found: Tensor = model(fake).mean() - model(real).mean() + 10 * penalty
        return found

    batches = [(torch.randn(16, 5) + 1, torch.randn(16, 5)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), batches, loss


def differential_equation() -> Case:
    """A physics-informed network: u' = −u, u(0) = 1."""

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        t = batch[0].clone().requires_grad_()
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        found: Tensor = (du + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
        return found

    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, [(torch.rand(32, 1),)], loss


def with_own_loss(key: str = "loss") -> nn.Module:
    """Return a model that returns a plain dict, as many training frameworks' do."""
    of = lambda m, x, y: {key: functional.cross_entropy(m.net(x), y)}  # noqa: E731
    return Computes(of, net=mlp(16, 16, 6))


def own_loss() -> Case:
    return with_own_loss(), blobs()[:1], None


def few_labelled_nodes() -> Case:
    (x, y), nodes = blobs()[0], torch.arange(32)
    adjacency = (nodes % 6 == nodes[:, None] % 6) / 6.0
    batch = x, adjacency, y, nodes % 5 == 0

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, adjacency, y, is_labelled = batch
        return functional.cross_entropy(model(x, adjacency)[is_labelled], y[is_labelled])

    parts = {"first": nn.Linear(16, 32), "last": nn.Linear(32, 6)}
    return Computes(lambda m, x, a: a @ m.last(m.first(x).relu()), **parts), [batch], loss


CASES: dict[str, tuple[Callable[[], Case], tuple[str, ...]]] = {
    "standardised in forward": (standardised_in_forward, ("input-scale", "input-mean")),
    "batch normalisation first": (batch_norm_first, ("input-scale", "input-mean")),
    "Fourier features": (fourier_features, ("input-scale", "input-mean")),
    "adversarial training": (adversarial, ("samples-mixed",)),
    "a frozen reference": (frozen_reference, ("frozen",)),
    "gates that begin at zero": (zero_gates, ("vanishing",)),
    "bags of instances": (bags, ("softmax-over-samples",)),
    "a graph of few labels": (few_labelled_nodes, ("class-untaught",)),
}

RATES = {"gates that begin at zero": 1e-3}


def audited(case: Case, steps: int = 24, rate: float = 3e-3) -> AuditReport:
    model, batches, loss = case

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)

    return audit(model, batches, loss=loss, optimizer=adam, steps=steps, try_fixes=False)


@pytest.mark.slow(one_in=7)
@pytest.mark.parametrize("name", CASES)
def test_what_looks_like_a_fault_is_not_told(name: str) -> None:
    make, faults = CASES[name]
    torch.manual_seed(0)
    report = audited(make(), rate=RATES.get(name, 3e-3))
    assert not {finding.name for finding in report.findings} & set(faults)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("make", [gradient_penalty, differential_equation, own_loss])
def test_of_correct_programs_with_unusual_losses_there_is_nothing_to_act_on(
    make: Callable[[], Case],
) -> None:
    report = audited(make(), steps=6, rate=1e-2)
    assert len(report.record.losses) == 6 and all(map(math.isfinite, report.record.losses))
    assert [finding.name for finding in report.findings if finding.strength == "act"] == []


def test_a_dict_without_a_loss_is_told() -> None:
    expected = "gave dict, expected a model that gives its own loss, as the `loss`"
    with pytest.raises(TypeError, match=expected):
        audit(with_own_loss("nll"), blobs()[:1], steps=2)


def recurrent(inner: nn.Module) -> nn.Module:
    """Return a network that reads the four parts of a sample one after the other."""
    of = lambda m, x: m.head(m.inner(x.view(-1, 4, 4))[0][:, -1])  # noqa: E731
    return Computes(of, inner=inner, head=nn.Linear(16, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(16, 64, 6),
        lambda: recurrent(nn.LSTM(4, 16, batch_first=True)),
        lambda: recurrent(nn.GRU(4, 16, batch_first=True)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 8, 3), nn.ReLU(),
                              nn.Flatten(), nn.Linear(112, 6)),
    ],
    ids=["linear", "LSTM", "GRU", "convolution"],
)  # fmt: skip
@pytest.mark.parametrize("factor", [1e3, 1e-3])
@pytest.mark.slow(one_in=8)
def test_inputs_that_a_layer_reads_as_they_are_are_told(
    make: Callable[[], nn.Module], factor: float
) -> None:
    report = audited((make(), blobs(factor), cross_entropy))
    assert "input-scale" in {finding.name for finding in report.findings}
