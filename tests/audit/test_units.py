"""Dead and saturated units, against slopes by differentiation and units that are dead by design."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adiv_monitor.audit.experiments.modules import Units

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


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", [*MODULES, *(f"{name}()" for name in FUNCTIONS)])
def test_flat_is_where_the_slope_is_below_two_percent(name: str) -> None:
    model = Calls(FUNCTIONS[name[:-2]]) if name.endswith("()") else MODULES[name]
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
