"""Trained parameters may change between steps: a report covers those that its step trained."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from adiv_monitor import Monitor, StepReport


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def reports(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    change: Callable[[int], object],
    steps: int = 4,
    every_n_steps: int = 1,
) -> dict[int, StepReport]:
    """Train and return the reports; `change` is called just before the forward pass of a step."""
    torch.manual_seed(1)
    monitor = Monitor(model, optimizer, every_n_steps=every_n_steps, on_error="raise")
    with monitor:
        for step in range(steps):
            change(step)
            optimizer.zero_grad()
            model(torch.randn(7, 6)).square().sum().backward()
            optimizer.step()
    return {report.step: report for report in monitor.reports}


def measured(report: StepReport) -> set[str]:
    assert report.coverage == 1
    assert not report.unsupported and not report.unmeasured
    return set(report.layers)


@pytest.mark.parametrize("when", [0, 2])
def test_a_layer_is_unfrozen(when: int) -> None:
    model = network()
    model[0].requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == when:
            model[0].requires_grad_(True)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), unfreeze)
    for step, report in found.items():
        assert measured(report) == ({"0", "2", "4"} if step >= when else {"2", "4"})


def test_a_layer_is_frozen() -> None:
    model = network()

    def freeze(step: int) -> None:
        model[0].requires_grad_(step != 1)

    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), freeze)
    for step, report in found.items():
        assert measured(report) == ({"2", "4"} if step == 1 else {"0", "2", "4"})


def test_layers_are_trained_in_turn() -> None:
    model = network()

    def turn(step: int) -> None:
        for i, layer in enumerate((model[0], model[2], model[4])):
            layer.requires_grad_(step % 3 == i)

    turn(2)
    found = reports(model, torch.optim.SGD(model.parameters(), lr=0.1), turn, 6, every_n_steps=2)
    assert [measured(found[step]) for step in (0, 2, 4)] == [{"0"}, {"4"}, {"2"}]


def test_a_group_is_added_to_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)

    def add(step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        if step == 2:
            model.append(nn.Linear(3, 2))
            optimizer.add_param_group({"params": list(model[5].parameters())})

    found = reports(model, optimizer, add)
    assert [set(report.layers) for report in found.values()] == [
        *({"4"}, {"0", "4"}, {"0", "4", "5"}, {"0", "4", "5"})
    ]
    for report in found.values():
        assert report.coverage == 1
        assert set(report.unsupported) <= {"0", "2"} - set(report.layers)


def test_what_is_unfrozen_between_the_passes_of_a_step_is_missed_and_counted() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, on_error="raise") as monitor:
        model(torch.randn(7, 6)).square().sum().backward()
        model[0].requires_grad_(True)
        model(torch.randn(7, 6)).square().sum().backward()
        optimizer.step()
    report = monitor.latest
    assert report is not None
    assert set(report.layers) == {"2", "4"}
    assert report.coverage < 1
    assert any("became trainable" in note for note in report.notes)
