"""Modules that run again leave the generators and weights of the run as they were."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor

GLOBAL = torch.Generator()
GLOBAL_OF_NUMPY = np.random.default_rng(0)
DRAWS: dict[str, Callable[["Drawing"], float]] = {
    "a global": lambda module: float(torch.rand((), generator=GLOBAL)),
    "a global of numpy": lambda module: GLOBAL_OF_NUMPY.random(),
    "of the class": lambda module: float(torch.rand((), generator=module.shared)),
    "in a dictionary": lambda module: float(torch.rand((), generator=module.kept["noise"])),
    "in a list": lambda module: module.listed[0].random(),
    "in an object": lambda module: float(torch.rand((), generator=module.held.noise)),
    "in a partial": lambda module: float(module.draw()),
}


class Drawing(nn.Module):
    """Measured as a whole, as no rule describes `cdist`; draws from a generator of its own."""

    shared = torch.Generator()

    def __init__(self, draws: Callable[["Drawing"], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.draws = draws
        self.kept = {"noise": torch.Generator()}
        self.listed = [np.random.default_rng(0)]
        self.held = SimpleNamespace(noise=torch.Generator(), count=0)
        self.draw = partial(torch.rand, (), generator=torch.Generator())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x * (1 + self.draws(self)), self.weight)


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("name", DRAWS)
def test_generators_outside_of_torchs_own_are_put_back(name: str, realised: bool) -> None:
    def build() -> nn.Module:
        for generator in (GLOBAL, Drawing.shared):
            generator.manual_seed(0)
        GLOBAL_OF_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
        return nn.Sequential(nn.Linear(3, 6), Drawing(DRAWS[name]))

    assert_trains_as_alone(build, realised)


class Noise:
    """An object that is called, and draws."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __call__(self, module: nn.Module) -> float:
        return float(torch.rand((), generator=self.own))


def of_forward(own: torch.Generator) -> nn.Module:
    class Local(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x * (1 + float(torch.rand((), generator=own))), self.weight)

    return Local(len)


def of_hook(own: torch.Generator) -> nn.Module:
    module = Drawing(lambda _: 0.0)
    module.register_forward_pre_hook(lambda _, args: args[0] + float(torch.rand((), generator=own)))
    return module


def inside(own: torch.Generator) -> Callable[[nn.Module], float]:
    def draws(module: nn.Module) -> float:
        def inner() -> float:
            return float(torch.rand((), generator=own))

        return inner()

    return draws


SEEN: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "closure of a forward": of_forward,
    "closure of a hook": of_hook,
    "function inside": lambda own: Drawing(inside(own)),
    "partial": lambda own: Drawing(partial(inside(own))),
    "object": lambda own: Drawing(Noise(own)),
}


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("name", SEEN)
def test_generators_that_functions_see_are_put_back(name: str, realised: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), SEEN[name](torch.Generator().manual_seed(0)))

    assert_trains_as_alone(build, realised)


def assert_trains_as_alone(build: Callable[[], nn.Module], realised: bool) -> None:
    """Train for three steps without and with a monitor, and compare all parameters."""
    runs = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        around: Any = nullcontext()
        if monitored:
            around = Monitor(model, optimizer, every_n_steps=1, realised=realised)
        with around:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(5, 3)).square().sum().backward()
                optimizer.step()
        runs.append([*model.parameters()])
    assert all(map(torch.equal, *runs))


class Averaged(nn.Module):
    """A student, and a frozen teacher that the forward itself moves, as that of MoCo does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 4), nn.Linear(3, 4)
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
        return torch.cdist(self.student(x), self.weight) - self.teacher(x)


@pytest.mark.parametrize("realised", [False, True], ids=["", "realised"])
@pytest.mark.parametrize("in_place", [False, True])
def test_frozen_parameters_that_a_forward_moves_are_moved_by_the_run_alone(
    in_place: bool, realised: bool
) -> None:
    assert_trains_as_alone(lambda: Averaged(in_place), realised)
