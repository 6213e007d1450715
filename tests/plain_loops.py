"""Plain loops with a monitor, and reports of trainers' callbacks beside theirs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor import Monitor, StepReport


def plain_loop(
    model: nn.Module,
    optimizer: Optimizer,
    losses: Iterable[Tensor],
    accumulate: int = 1,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> list[StepReport]:
    """Train on losses that are computed as they are asked for; measure every second step."""
    with Monitor(model, optimizer, every_n_steps=2, on_error="raise") as monitor:
        for index, loss in enumerate(losses):
            monitor.log_loss(loss)
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                prepare(model)
                optimizer.step()
                optimizer.zero_grad()
    return list(monitor.reports)


def climb(rules: list[Any], **options: Any) -> Monitor:
    """Train three steps against the gradient, with these alarms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with Monitor(model, optimizer, every_n_steps=1, alarms=rules, **options) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    return monitor


def assert_same(ours: list[StepReport], expected: list[StepReport]) -> None:
    """Assert that both have the same steps, losses and readings."""
    assert [report.step for report in ours] == [report.step for report in expected]
    for one, other in zip(ours, expected, strict=True):
        assert one.layers.keys() == other.layers.keys()
        assert (one.coverage, one.unsupported) == (other.coverage, other.unsupported)
        assert one.losses == pytest.approx(other.losses, rel=1e-4)
        assert one.loss is not None
        # A Trainer may have one parameter group with decay and one without.
        assert one.learning_rates and set(one.learning_rates) == set(other.learning_rates)
        for path, reading in one.layers.items():
            assert reading.measures() == pytest.approx(
                other.layers[path].measures(), rel=1e-4, abs=1e-6, nan_ok=True
            )


def losses_of(reports: list[StepReport]) -> dict[int, float]:
    """Return the loss of every step."""
    return {step: loss for report in reports for step, loss in report.losses.items()}
