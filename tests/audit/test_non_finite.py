"""Values that are not finite are reported for the place that produced them."""

from typing import Any

import pytest
import torch
from audited import batches, cross_entropy, mlp, seen, sgd
from torch import Tensor, nn

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
    class Root(nn.Module):
        """√0 is fine forward, and has no slope."""

        def forward(self, x: Tensor) -> Tensor:
            return (0 * x).sqrt() + x

    model = mlp(nn.Linear(12, 12), Root())
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
