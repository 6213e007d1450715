"""Trained parameters may change between steps: a report covers those that its step trained."""

from collections.abc import Callable
from itertools import count

import torch
from setups import trained
from torch import Tensor, nn

from adiv_monitor import StepReport


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def reports(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    change: Callable[[int], object],
    steps: int = 4,
) -> dict[int, StepReport]:
    """Train and return the reports; `change` is called just before the forward pass of a step."""
    numbers = count()

    def loss(model: nn.Module) -> Tensor:
        change(next(numbers))
        return model(torch.randn(7, 6)).square().sum()

    reports = trained(model, loss, steps, optimizer=optimizer)
    return {report.step: report for report in reports}


LATE = "became trainable after the step was prepared"


def test_a_layer_is_unfrozen() -> None:
    """The report of a step that was prepared before says that it lacks the layer."""
    model = network()
    model[0].requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), unfreeze)
    assert [set(r.layers) for r in found.values()] == [{"2", "4"}] * 3 + [{"0", "2", "4"}]
    assert [any(LATE in note for note in r.notes) for r in found.values()] == [0, 0, 1, 0]
    assert [report.coverage == 1 for report in found.values()] == [1, 1, 0, 1]


def test_a_layer_is_frozen() -> None:
    model = network()

    def freeze(step: int) -> None:
        model[0].requires_grad_(step != 1)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), freeze)
    expected = [{"0", "2", "4"}, {"2", "4"}, {"2", "4"}, {"0", "2", "4"}]
    assert [report.layers.keys() for report in found.values()] == expected
    assert [report.coverage == 1 for report in found.values()] == [1, 1, 0, 1]


def test_a_group_is_added_to_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)

    def add(step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})

    found = reports(model, optimizer, add, 3)
    assert [set(report.layers) for report in found.values()] == [{"4"}, {"4"}, {"0", "4"}]
    assert [any(LATE in note for note in r.notes) for r in found.values()] == [0, 1, 0]
