"""Two processes: each looks at its own rows, and at what the averaged gradient does to them."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor

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
    with Monitor(parallel, optimizer, on_error="raise") as monitor:
        functional.cross_entropy(parallel(x[mine]), y[mine]).backward()
        optimizer.step()
    assert monitor.latest is not None
    torch.save(monitor.latest, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_each_process_measures_its_rows_under_the_averaged_gradient(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(train, (port, str(tmp_path)), nprocs=WORLD)
    model, x, y = model_and_data()
    hidden = torch.tanh(model[0](x)).detach().requires_grad_()
    z = model[2](hidden)
    G = torch.autograd.grad(functional.cross_entropy(z, y), z, retain_graph=True)[0]
    features = torch.cat([hidden.detach(), torch.ones(8, 1)], dim=1)
    e = features @ (G.T @ features).T
    for rank in range(WORLD):
        report = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert report.layers.keys() == {"0", "2"}
        assert "One of 2 processes" in report.notes[0]
        mine = slice(4 * rank, 4 * rank + 4)
        own = features.square().sum(1)[mine, None] * G[mine]
        reading = report.layers["2"]
        cosine = functional.cosine_similarity(e[mine].flatten(), G[mine].flatten(), dim=0)
        assert reading.gradient_cosine == pytest.approx(cosine.item(), rel=1e-9)
        ratio = (e[mine] - own).norm() / own.norm()
        assert reading.interference_ratio == pytest.approx(ratio.item(), rel=1e-9)
        descent = 0.1 * (G.T @ features).square().sum()
        assert reading.descent == pytest.approx(descent.item(), rel=1e-9)
