"""Parts that do not train: planted by hand, and models without any."""

from typing import Any

import pytest
import torch
from audited import Batch, mlp, seen
from torch import Tensor, nn

from adiv_monitor.diagnosis.record import Wiring


class Net(nn.Module):
    """A model with a detached branch, one multiplied by zero, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.cut = nn.Linear(6, 3)
        self.zero = nn.Linear(6, 3, bias=False)
        self.idle = nn.Linear(6, 3, bias=False)
        self.fixed = nn.Linear(6, 3, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.cut(x).detach() + 0 * self.zero(x) + self.fixed(x)


def test_each_fault_by_its_name() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.body.weight, model.cut.weight, model.zero.weight], lr=0.1)

    wiring = seen(Net(), optimizer=optimizer).wiring
    assert wiring.not_held == ("body.bias",)
    assert wiring.unreached == ("cut.weight", "cut.bias", "idle.weight")
    assert wiring.unused == ("idle.weight",)
    assert wiring.zero_gradient == ("zero.weight",)
    assert wiring.frozen == ("fixed.weight",)
    assert wiring.input_matters > 0.1


def test_a_sound_model_has_none() -> None:
    wiring = seen(mlp(nn.Dropout(), nn.BatchNorm1d(12))).wiring
    assert Wiring(input_matters=wiring.input_matters) == wiring


class Ignores(nn.Module):
    """A model that ignores its input."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.map, self.share = nn.Linear(6, 3), share

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return nn.functional.dropout(self.map(self.share * x) + 1)


def named(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(x=batch[0], labels=batch[1]), batch[1])


def by_place(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(*batch), batch[1])


@pytest.mark.parametrize("loss", [named, by_place])
def test_inputs_that_make_no_difference(loss: Any) -> None:
    assert seen(Ignores(0), loss=loss).wiring.input_matters == 0
    assert seen(Ignores(1), loss=loss).wiring.input_matters > 0.1
