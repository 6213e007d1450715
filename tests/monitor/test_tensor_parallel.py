"""Tensor parallelism is refused: the reason is reported, and the training is unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import meet, run_in
from torch import Tensor, nn

from adiv_monitor import Monitor

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
WORLD, STEPS = 2, 3


def split() -> nn.Module:
    """Return a network of which each rank has a part; the normalisation is whole in both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def own(tensor: Tensor) -> Tensor:
    part: Any = getattr(tensor, "_local_tensor", tensor)
    return part.detach().clone()  # type: ignore[no-any-return]


def train(*, monitored: bool) -> tuple[list[Tensor], Any]:
    model = split()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every_n_steps=1, on_error="raise")
    if monitored:
        monitor.attach()
    for step in range(STEPS):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    monitor.close()
    return list(map(own, model.parameters())), monitor.latest


def work(rank: int, folder: str) -> None:
    meet(rank, WORLD, folder)
    plain, _ = train(monitored=False)
    weights, report = train(monitored=True)
    told = report.layers, report.unsupported, report.coverage
    torch.save((all(map(torch.equal, plain, weights)), *told), Path(folder) / f"{rank}.pt")


@pytest.mark.slow
def test_nothing_is_measured_and_the_training_is_the_same(tmp_path: Path) -> None:
    run_in(WORLD, work, str(tmp_path))
    for rank in range(WORLD):
        same, layers, unsupported, coverage = torch.load(
            tmp_path / f"{rank}.pt", weights_only=False
        )
        assert same and not layers and coverage == 0
        assert list(unsupported) == ["0", "1", "3"]
        assert all("tensor parallelism, which is not measured" in x for x in unsupported.values())
