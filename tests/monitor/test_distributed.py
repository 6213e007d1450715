"""Two processes: each looks at its own rows, and at what the averaged gradient does to them.

They measure the same steps, and none waits for a process without a monitor.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from setups import free_port
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.step import times

WORLD = 2


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))


def train(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    model, x, y = model_and_data()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = slice(4 * rank, 4 * rank + 4)
    with Monitor(parallel, optimizer, realised=True, on_error="raise") as monitor:
        functional.cross_entropy(parallel(x[mine]), y[mine]).backward()
        optimizer.step()
    assert monitor.latest is not None
    torch.save(monitor.latest, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


FIRST = [(0, 16), (16, 16), (72, 36)]  # a cost of 4 plain steps at a bound of 1/10: 36
# Which processes have a monitor, and the steps that each measures, with the interval.
MONITORED = [([1], [[], FIRST[:2]]), ([0], [FIRST, []]), ([0, 1], [FIRST, FIRST])]


def train_within_a_bound(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    steps = [measured_steps(rank if rank in ranks else None) for ranks, _ in MONITORED]
    torch.save(steps, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def measured_steps(rank: int | None) -> list[tuple[int, int | None]]:
    """By clocks that differ: to the second process a measured step seems to cost more."""
    model, x, y = model_and_data()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(parallel, optimizer, every_n_steps=16, max_overhead=0.1, on_error="raise")
    seconds = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(times.HostClock, "now", lambda self: seconds)
        if rank is not None:
            monitor.attach()
        for _ in range(100):
            optimizer.zero_grad()
            functional.cross_entropy(parallel(x), y).backward()
            seconds += 1 + 4 * bool(model[0]._forward_hooks) * (1 + (rank or 0))
            optimizer.step()
    return [(report.step, report.interval) for report in monitor.reports]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_processes_agree_on_the_interval_and_wait_for_none(tmp_path: Path) -> None:
    multiprocessing.spawn(train_within_a_bound, (free_port(), str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found == [expected[rank] for _, expected in MONITORED]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_each_process_measures_its_rows_under_the_averaged_gradient(tmp_path: Path) -> None:
    multiprocessing.spawn(train, (free_port(), str(tmp_path)), nprocs=WORLD)
    model, x, y = model_and_data()
    hidden = torch.tanh(model[0](x)).detach().requires_grad_()
    z = model[2](hidden)
    G = torch.autograd.grad(functional.cross_entropy(z, y), z, retain_graph=True)[0]
    features = torch.cat([hidden.detach(), torch.ones(8, 1)], dim=1)
    e = features @ (G.T @ features).T
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    functional.cross_entropy(model(x), y).backward()
    sgd.step()
    really = (z - model(x)).detach()
    for rank in range(WORLD):
        report = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert report.layers.keys() == {"0", "2"}
        assert "One of 2 processes" in report.notes[0]
        mine = slice(4 * rank, 4 * rank + 4)
        own = features.square().sum(1)[mine, None] * G[mine]
        reading = report.layers["2"]
        cosine = functional.cosine_similarity(really[mine].flatten(), G[mine].flatten(), dim=0)
        assert reading.realised_cosine == pytest.approx(cosine.item(), rel=1e-9)
        cosine = functional.cosine_similarity(e[mine].flatten(), G[mine].flatten(), dim=0)
        assert reading.gradient_cosine == pytest.approx(cosine.item(), rel=1e-9)
        ratio = (e[mine] - own).norm() / own.norm()
        assert reading.interference_ratio == pytest.approx(ratio.item(), rel=1e-9)
        descent = 0.1 * (G.T @ features).square().sum()
        assert reading.descent == pytest.approx(descent.item(), rel=1e-9)
