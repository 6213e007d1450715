"""Values that are not finite, by the place that made them; units that are dead or saturated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import batches, cross_entropy, mlp, seen, sgd
from computes import Computes
from torch import Tensor, nn
from torch.nn import functional as F

from adiv_monitor.audit.experiments.modules import Units
from adiv_monitor.diagnosis.faults.inputs import HIDDEN


class Breaks(nn.Module):
    """A layer with non-finite outputs in its third training call; -∞ before, as in masks."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.value if self.calls == 3 else x


class Masked(nn.Module):
    """A layer with -∞ in its outputs, which is no fault."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, torch.full_like(x[:, :1], -torch.inf)), 1)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1)[:, :-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_function_and_its_module(value: float) -> None:
    record = seen(nn.Sequential(mlp(Masked(), nn.Sequential(Softmax(), Breaks(value)))))
    assert (record.first_non_finite or "").startswith("result of mul in '0.3.1' (test_non_finite")
    assert len(record.losses) == 3


def test_data() -> None:
    data = batches()
    data[2][0][3, 1] = torch.nan
    assert seen(mlp(), data).first_non_finite == "data"


def test_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (cross_entropy(model, batch) * 0).log().neg()

    record = seen(mlp(), loss=loss)
    assert (record.first_non_finite or "").startswith("result of neg (test_non_finite")
    assert record.losses == (float("inf"),)


def test_parameters_that_a_step_broke() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [model[0].weight], "lr": 3e38}, {"params": [model[2].weight]}]
        return torch.optim.SGD(groups, lr=0.1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return 1000 * cross_entropy(model, batch)

    record = seen(mlp(), optimizer=optimizer, loss=loss)
    assert record.first_non_finite == "parameter 0.weight after step 0"
    assert len(record.losses) == 2


def test_gradients() -> None:
    """√0 is fine forward, and has no slope."""
    model = mlp(nn.Linear(12, 12), Computes(lambda m, x: (0 * x).sqrt() + x))
    record = seen(model, optimizer=sgd())
    assert (record.first_non_finite or "").startswith("gradient of mul (test_non_finite.py:")
    assert record.gradient_norms[0] != record.gradient_norms[0]


def test_a_finite_run_has_none() -> None:
    assert seen(mlp(Masked(), Softmax())).first_non_finite is None


@pytest.mark.parametrize("columns", [1, 2])
def test_rows_are_hidden_as_a_whole_if_they_have_several_entries(columns: int) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        logs = (cross_entropy(model, batch) * torch.zeros(3, columns)).log()
        return (logs * 0).sum()

    record = seen(mlp(), loss=loss)
    assert record.first_non_finite is not None
    assert record.first_non_finite.startswith("result of mul (test_non_finite")
    assert record.first_non_finite.endswith(HIDDEN) is (columns > 1)


MODULES: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "hardtanh": nn.Hardtanh(-2, 1),
    "gelu": nn.GELU(),
    "elu": nn.ELU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "hardswish": nn.Hardswish(),
    "softplus": nn.Softplus(),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(),
    "relu_": lambda x: x.clone().relu_(),
    "relu by clamp": lambda x: x.clamp(min=0),
    "sigmoid": torch.special.expit,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", [*MODULES, *(f"{name}()" for name in FUNCTIONS)])
def test_flat_is_where_the_slope_is_below_two_percent(name: str) -> None:
    called = name.endswith("()")
    model = Computes(lambda m, x: FUNCTIONS[name[:-2]](x)) if called else MODULES[name]
    x = torch.linspace(-12.01, 12, 24_000, dtype=torch.float64)[:, None].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    steep = (slope.abs() >= 0.02 * slope.abs().max()).nonzero()[:, 0]
    within = torch.arange(len(x))
    flat = (within < steep[0]) | (within > steep[-1])  # not the slope's zero in between
    units = Units(model)
    with units.watching():
        model(x)
    (found,) = units.statistics().values()
    assert found.function == name.split()[0].removesuffix("()").removesuffix("_")
    assert found.saturated == pytest.approx(flat.double().mean().item(), abs=5e-4)


def test_a_unit_is_dead_only_if_no_row_of_any_batch_wakes_it() -> None:
    model = nn.Sequential(nn.ReLU())
    units = Units(model)
    for x in (torch.tensor([[1.0, -1, -1, 0]]), torch.tensor([[-1.0, -1, 1, -1]])):
        with units.watching():
            model(x)
    assert units.statistics()["0"].dead == 2


def test_tanh_and_sigmoid_inside_of_another_activation_are_not_looked_at() -> None:
    class NewGELUActivation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))

    class QuickGELU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(1.702 * x)

    model = nn.Sequential(NewGELUActivation(), QuickGELU(), nn.Hardswish())
    units = Units(model)
    with units.watching():
        model(torch.randn(5, 4))
    found = {path: u.function for path, u in units.statistics().items()}
    assert found == {"2": "hardswish"}


def test_batches_that_a_part_sits_out_do_not_count() -> None:
    class Expert(nn.Sequential):
        """Runs for positive samples only."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x[0, 0] > 0 else x

    model = Expert(nn.Linear(2, 4), nn.ReLU())
    units = Units(model)
    for number in range(8):
        with units.watching():
            model(torch.ones(3, 2) if number % 4 == 0 else -torch.ones(3, 2))
    assert units.statistics()["1"].batches == 2
