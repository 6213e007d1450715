"""Modules that run again leave weights, state and generators of the run as they were."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.alignment import Probe

CRITERION = nn.CrossEntropyLoss()
DRAWS: dict[str, Callable[["Drawing"], float]] = {
    "torch": lambda module: float(torch.rand((), generator=module.noise)),
    "numpy": lambda module: module.numbers.random(),
    "python": lambda module: module.dice.random(),
    "global": lambda module: random.random() + np.random.random() + float(torch.rand(())),
}


class Drawing(nn.Module):
    """Measured as a whole, as no rule describes `cdist`; draws from a generator of its own."""

    def __init__(self, draws: Callable[["Drawing"], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.draws = draws
        self.noise, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.dice = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x * (1 + self.draws(self)), self.weight)


class Averaged(nn.Module):
    """A student, and a frozen teacher that the forward itself moves, as that of MoCo does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(4, 4))  # no rule: measured through this module
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, other in pairs:
                if self.in_place:
                    mine.lerp_(other, 0.1)
                else:
                    mine.data = 0.9 * mine.data + 0.1 * other.data
            self.student.bias.clamp_(-0.2, 0.2)
        return torch.cdist(self.student(x), self.weight) - self.teacher(x)


class RunningScale(nn.Module):
    """Divides by the root of a running mean square, which is no buffer."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.mean, self.calls = in_place, torch.ones(()), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        now = x.detach().square().mean()
        if self.in_place:
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * now
        return x / self.mean.clone() ** 0.5


def net(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), middle, nn.ReLU(), nn.LazyLinear(3))


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=drawn), torch.arange(12) % 3


def loss(model: nn.Module, number: int) -> Tensor:
    x, y = data()
    return CRITERION(model((1 + number) * x), y)


STATES: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda draws=draws: Drawing(draws) for name, draws in DRAWS.items()},
    "teacher in place": lambda: Averaged(True),
    "teacher anew": lambda: Averaged(False),
    "tensor in place": lambda: RunningScale(True),
    "tensor anew": lambda: RunningScale(False),
}
MEASURES: dict[str, dict[str, Any]] = {
    "": {},
    "realised": {"realised": CRITERION},
    "alignment": {"alignment": Probe(data()[0])},
}


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("state", STATES)
def test_the_run_is_the_one_without_a_monitor(state: str, measure: str) -> None:
    runs = []
    for monitored in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = net(STATES[state]())
        model(data()[0])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        around: Any = nullcontext()
        if monitored:
            around = Monitor(model, optimizer, every_n_steps=1, **MEASURES[measure])
        with around:
            for number in range(3):
                optimizer.zero_grad()
                loss(model, number).backward()
                optimizer.step()
        drawn = random.random(), np.random.random(), float(torch.rand(()))
        runs.append(([*model.parameters()], drawn, getattr(model[1], "calls", 0)))
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    assert runs[0][1:] == runs[1][1:]


def on_probe(model: nn.Module) -> float:
    """Return the loss of the first eight samples of the first batch, in evaluation mode."""
    x, y = data()
    with torch.no_grad():
        return CRITERION(model.eval()(x[:8]), y[:8]).item()


@pytest.mark.parametrize("in_place", [False, True])
def test_the_realised_change_of_the_loss_starts_from_the_state_of_the_step(in_place: bool) -> None:
    torch.manual_seed(0)
    model = net(RunningScale(in_place))
    model(data()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        for number in range(3):
            optimizer.zero_grad()
            loss(model, number).backward()
            old, new = copy.deepcopy(model), copy.deepcopy(model)
            optimizer.step()
    assert monitor.latest is not None
    new.load_state_dict({**new.state_dict(), **dict(model.named_parameters())})
    change = on_probe(new) - on_probe(old)
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)


def test_hooks_and_closures_share_the_state() -> None:
    """As the features that hooks collect for a model's forward, in a dictionary of both."""

    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.shift = torch.zeros(3, requires_grad=True)  # trained, though no parameter
            self.features = features = {}

            def keep(module: nn.Module, args: Any, output: Tensor) -> None:
                features["z"] = output

            self.first.register_forward_hook(keep)

        def forward(self, x: Tensor) -> Tensor:
            self.first(x)
            return self.last(torch.relu(self.features.pop("z"))) + self.shift

    model = Collecting()
    optimizer = torch.optim.SGD([*model.parameters(), model.shift], 0.1)
    with Monitor(model, optimizer, every_n_steps=1, realised=CRITERION) as monitor:
        loss(model, 0).backward()
        before = on_probe(model)
        optimizer.step()
    assert monitor.latest is not None
    # The probe runs with the parameters of before; what is no parameter has moved then.
    change = on_probe(model) - before
    assert monitor.latest.realised_loss_change == pytest.approx(change, rel=1e-4)
