"""Two ranks: probes that are parts of one batch, and sharded weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import meet, run_in
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.alignment import Alignment, Probe

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
WORLD = 2


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 18), nn.Tanh(), nn.Linear(18, 20), nn.Tanh(), nn.Linear(20, 3)
    )
    return model.double(), torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def both(rank: int, folder: str) -> None:
    meet(rank, WORLD, folder)
    parallel(rank, folder)
    sharded(rank, folder)


def parallel(rank: int, folder: str) -> None:
    model, x, y = model_and_data()
    model = DistributedDataParallel(model)
    mine = x[4 * rank : 4 * rank + 4]
    together = Alignment(model, Probe(mine, process_group=dist.group.WORLD))
    alone = Alignment(model, Probe(mine))
    groups = [dist.new_group([other]) for other in range(WORLD)]
    apart = Alignment(model, Probe(mine, process_group=groups[rank]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe = Probe(mine, process_group=dist.group.WORLD)
    with Monitor(model, optimizer, alignment=probe, on_error="raise") as monitor:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert monitor.latest.alignment["2"].rows == 8
    steps(model, x, y)
    found = alone.read() if rank == 0 else None  # not a collective: waits for no other rank
    assert apart.read() == found or rank
    torch.save(together.read(), Path(folder) / f"parallel{rank}.pt")


def sharded(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x, y = model_and_data()
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = x[4 * rank : 4 * rank + 4]
    alignment = Alignment(model, Probe(mine, process_group=dist.group.WORLD))
    saved = alignment.state_dict()
    steps(model, x, y)
    readings = alignment.read()
    resumed = Alignment(model, Probe(mine, process_group=dist.group.WORLD))
    resumed.load_state_dict(saved)
    assert resumed.read() == readings
    assert saved["snapshots"][0]["weights"]["2"].shape == (10, 18)  # this rank's part only
    assert all(hasattr(p, "full_tensor") for p in model.parameters())  # sharded again
    steps(model, x, y)
    torch.save((readings, alignment.read()), Path(folder) / f"sharded{rank}.pt")


@pytest.mark.slow
def test_probes_make_up_one_and_sharded_weights_are_measured_whole(tmp_path: Path) -> None:
    run_in(WORLD, both, str(tmp_path))
    model, x, y = model_and_data()
    alignment = Alignment(model, Probe(x))
    readings = []
    for _ in range(2):
        steps(model, x, y)
        readings.append(alignment.read())
    for rank in range(WORLD):
        together = torch.load(tmp_path / f"parallel{rank}.pt", weights_only=False)
        sharded = torch.load(tmp_path / f"sharded{rank}.pt", weights_only=False)
        for found, expected in zip([together, *sharded], [readings[0], *readings], strict=True):
            assert found.keys() == expected.keys() == {"0", "2", "4"}
            for path, reading in found.items():
                assert reading.rows == 8
                assert reading.measures() == pytest.approx(expected[path].measures(), rel=1e-9)
