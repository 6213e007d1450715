"""What the training loop did to a step: the model's mode, its passes, and its batches.

No reading tells these, so a report has them as they are.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport


class Net(nn.Module):
    """A model with dropout, attention and a norm with running statistics, and with others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.free = nn.BatchNorm1d(8, track_running_stats=False)
        self.drop, self.keep = nn.Dropout(0.1), nn.Dropout(0.0)
        self.alpha = nn.AlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.plain = nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.free(self.norm(self.first(x)))
        h = self.alpha(self.keep(self.drop(h)))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.plain(h, h, h, need_weights=False)[0]
        return self.last(h)


FACTS = ("zeroed_passes", "loss_gradients", "evaluated", "batch", "next_batch")
TARGETS = torch.arange(6) % 3
CHANGED = ("norm", "drop", "alpha", "attention")


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    return functional.cross_entropy(model(batch(number)), TARGETS)


def reports_of(
    model: nn.Module,
    step: Callable[[torch.optim.Optimizer, int], None],
    steps: int = 4,
    **asked: Any,
) -> list[StepReport]:
    """Train with a monitor, and return its reports; check that the run is as without it."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for monitored in (False, True):
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        torch.manual_seed(1)
        options = {"every_n_steps": 1, "on_error": "raise", **asked}
        monitor = Monitor(model, optimizer, **options)
        monitor.attach() if monitored else monitor.close()
        for number in range(steps):
            step(optimizer, number)
        monitor.close()
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))
    reports = list(monitor.reports)
    for report in reports:
        again = StepReport.from_dict(report.to_dict())
        assert all(getattr(again, name) == getattr(report, name) for name in FACTS)
    return reports


# --- the mode of the model ------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"layers_per_step": 2}])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.DataParallel(model)])
def test_a_model_left_in_eval_mode(asked: dict[str, Any], wrap: Callable[..., nn.Module]) -> None:
    model = wrap(Net())

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        model.train(number < 2)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    found = [set(report.evaluated) for report in reports_of(model, step, **asked)]
    assert found == [set(), set(), set(CHANGED), set(CHANGED)]


def test_parts_in_eval_mode_are_meant() -> None:
    model = Net()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        model.norm.eval()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    assert [report.evaluated for report in reports_of(model, step)] == [()] * 4


def test_an_evaluation_with_gradients_on_is_no_training_in_eval_mode() -> None:
    model = Net()

    def step(optimizer: torch.optim.Optimizer, number: int) -> None:
        model.eval()
        loss_of(model)
        model.train()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    assert [report.evaluated for report in reports_of(model, step)] == [()] * 4
