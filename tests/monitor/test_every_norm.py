"""Norms of gradient and update of every step, against those of plain tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.step.every_norm import EveryNorm

LIMIT = 0.3


def whole(tensors: list[Tensor]) -> float:
    return torch.cat([x.flatten() for x in tensors]).norm().item()


def trained(*, steps: int = 12, **given: Any) -> tuple[Monitor, list[float], list[float]]:
    """Train with a clipped gradient; return monitor, and the norms that a plain loop sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients, updates = [], []
    with Monitor(model, optimizer, every_n_steps=5, on_error="raise", **given) as monitor:
        for step in range(steps):
            x = torch.randn(6, 4, dtype=torch.float64) * (0.1 if step % 3 else 3)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            before = [p.detach().clone() for p in model.parameters()]
            gradients.append(whole([p.grad for p in model.parameters()]))
            optimizer.step()
            pairs = zip(model.parameters(), before, strict=True)
            updates.append(whole([p.detach() - old for p, old in pairs]))
    return monitor, gradients, updates


def test_norms_are_those_of_plain_tensors() -> None:
    monitor, gradients, updates = trained(watch="norms")
    reports = monitor.reports
    assert [sorted(r.gradient_norms) for r in reports] == [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    for field, expected in (("gradient_norms", gradients), ("update_norms", updates)):
        found = {s: x for report in reports for s, x in getattr(report, field).items()}
        assert found == pytest.approx(dict(enumerate(expected[:11])), rel=1e-6)


def test_measured_steps_that_clip_are_counted() -> None:
    monitor, gradients, _ = trained(watch="norms")
    expected = [gradients[step] > LIMIT * 0.999 for step in (0, 5, 10)]
    assert 0 < sum(expected) < 3
    assert monitor.reports[-1].clipped_share == pytest.approx(sum(expected) / 3)


def test_the_run_is_that_without_a_monitor() -> None:
    runs = [trained(watch=watch)[0]._training.model.state_dict() for watch in (None, "norms")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'norms' for sharded parameters"):
        EveryNorm(SimpleNamespace(shards=[1]))  # type: ignore[arg-type]
