"""Known uses of parameters give the same readings as a survey, which sees every function.

When a model changes in mid-run, no reading is wrong, and none is missing for long.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from setups import trained
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from adiv_monitor import Monitor
from adiv_monitor.capture import trace
from adiv_monitor.report import LayerReading, StepReport

Step = Callable[[int, nn.Module], None]


def run(
    build: Callable[[], nn.Module], steps: int, before: Step = lambda number, model: None
) -> list[StepReport]:
    """Return the reports of all steps."""
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, every_n_steps=1, on_error="raise", seed=3) as monitor:
        for number in range(steps):
            before(number, model)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if new := [p for p in model.parameters() if id(p) not in held]:
                optimizer.add_param_group({"params": new})
            optimizer.zero_grad()
            model(torch.randn(7, 12).double()).square().mean().backward()
            optimizer.step()
        monitor.complete_report()
    return [*monitor.reports]


def assert_same(expected: Mapping[str, LayerReading], report: StepReport) -> None:
    """Assert that all numbers of all readings agree up to rounding."""
    for path, reading in expected.items():
        found = asdict(report.layers[path])
        for name, value in asdict(reading).items():
            if isinstance(value, float | tuple | dict):
                value = pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)
            assert found[name] == value, (report.step, path, name)


@pytest.fixture
def always_whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(trace.Trace, "plan", lambda *_: None)


class Changing(nn.Module):
    """A module whose forward can be changed during training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.branch = nn.Linear(12, 12)
        self.late: nn.Module = nn.Linear(12, 12)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.takes_branch = self.takes_weight = self.repeats = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        x = torch.cat([self.conv(x.view(len(x), 2, 6)).flatten(1), x], 1)[:, :12]
        for _ in range(1 + 2 * self.repeats):
            x = self.late(x).tanh()
        if self.takes_branch:
            x = self.branch(x)
        if self.takes_weight:  # of a module that is not called
            x = functional.linear(x, self.branch.weight, self.branch.bias)
        made: Tensor = self.out(x)
        return made


def own_forward(model: Changing) -> None:
    late: Any = model.late
    late.forward = lambda x: functional.linear(x * 2, late.weight, late.bias)


def scaled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


CHANGES: dict[str, Callable[[Changing], object]] = {
    "a branch": lambda m: setattr(m, "takes_branch", True),
    "a function of a weight": lambda m: setattr(m, "takes_weight", True),
    "more calls": lambda m: setattr(m, "repeats", True),
    "evaluation mode": lambda m: m.norm.eval(),
    "another stride": lambda m: vars(m.conv).update(stride=(2,), padding=(2,)),
    "unfrozen": lambda m: m.late.requires_grad_(True),
    "frozen": lambda m: m.first.requires_grad_(False),
    "replaced": lambda m: setattr(m, "late", nn.Linear(12, 12).double()),
    "wrapped": lambda m: setattr(m, "late", nn.Sequential(nn.Identity(), m.late)),
    "parametrized": lambda m: parametrizations.weight_norm(m.late),
    "a hook that changes outputs": lambda m: m.late.register_forward_hook(scaled),
    "a hook that uses a weight": lambda m: m.late.register_forward_hook(
        lambda module, args, output: output + functional.linear(output, m.branch.weight)
    ),
    "a forward of its own": own_forward,
}


@pytest.mark.slow(one_in=13)
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_is_never_misread(name: str, always_whole: Callable[[], None]) -> None:
    def build() -> Changing:
        model = Changing()
        model.late.requires_grad_(name != "unfrozen")
        return model

    def before(number: int, model: nn.Module) -> None:
        if number == 5:
            CHANGES[name](model)  # type: ignore[arg-type]

    plain = run(build, 9, before)
    always_whole()
    watched = run(build, 9, before)
    for number, (one, other) in enumerate(zip(plain, watched, strict=True)):
        lost = other.layers.keys() - one.layers.keys()
        assert one.layers.keys() == other.layers.keys() - lost
        assert number == 5 or not lost
        told = " ".join(one.unsupported)
        assert all(path in told for path in lost)
        assert_same(
            {path: reading for path, reading in other.layers.items() if path not in lost}, one
        )


def test_what_is_frozen_by_turns_is_read_when_it_is_trained(
    always_whole: Callable[[], None],
) -> None:
    """Parameters frozen in turns, as in adversarial training, are read when they are trained."""

    def before(number: int, model: nn.Module) -> None:
        model.get_submodule("late").requires_grad_(number % 2 == 0)
        model.get_submodule("out").get_parameter("bias").requires_grad_(number % 3 != 0)

    plain = run(Changing, 8, before)
    always_whole()
    watched = run(Changing, 8, before)
    for one, other in zip(plain, watched, strict=True):
        assert one.layers.keys() == other.layers.keys()
        assert_same(other.layers, one)


def test_surveys_that_change_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is used outside of every forward pass, in every other step.

    Between surveys, no function is watched in modules that ran.
    """
    plan, numbers, plans = trace.Trace.plan, itertools.count(), list[trace.Plan | None]()

    def planned(self: trace.Trace, *given: Any) -> trace.Plan | None:
        plans.append(plan(self, *given))
        return plans[-1]

    def loss(model: nn.Module) -> Tensor:
        y = model[0](torch.randn(7, 12).double())
        if next(numbers) % 2:
            y = functional.linear(y, *model[1].parameters())
        return y.square().mean()

    monkeypatch.setattr(trace.Trace, "plan", planned)
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4)).double()
    trained(model, loss, 12)
    assert [step for step, made in enumerate(plans) if made is None] == [0, 2, 4, 6]
    assert all(made is None or made.watched == [model, model[1]] for made in plans)
