"""Lightning's strategies for several ranks write one file, equal to a plain loop's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pytorch_lightning")
import pytorch_lightning as pl
from lightning_setups import BATCHES, QUIET, trainer
from plain_loops import plain_loop
from processes import as_launched, meet, run_in
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn

from adiv_monitor.lightning import DivergenceCallback
from adiv_monitor.sinks import JsonlSink

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend"),
    *QUIET,
]
WORLD, SAMPLES = 2, 6
FOUR = BATCHES[:4]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Classifier(pl.LightningModule):
    """A classifier that reads its rank's share of a batch, or all if its layers are split."""

    def __init__(self, *, way: str) -> None:
        super().__init__()
        self.net = net()
        self._way = way

    def configure_model(self) -> None:
        if self._way == "model_parallel":
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[2], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = (part[self.global_rank :: WORLD] for part in batch)
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(FOUR, batch_size=None)


def fit(way: str, strategy: Any, folder: str | Path, **options: Any) -> None:
    path = Path(folder) / f"{way}.jsonl"
    callback = DivergenceCallback(2, sinks=[JsonlSink(path)], on_error="raise")
    fixed = {"devices": WORLD, "use_distributed_sampler": False, "callbacks": callback}
    trainer(strategy=strategy, **{**fixed, **options}).fit(Classifier(way=way))


class Steps(pl.Callback):
    """A callback that writes the number of steps of each rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, run: Any, model: Any) -> None:
        (self._folder / f"steps.{run.global_rank}").write_text(str(run.global_step))


def is_second(path: str, reading: object) -> bool:
    """Return whether this is the second layer, for an alarm that one layer raises."""
    return path == "net.2"


@pytest.mark.slow
def test_an_alarm_stops_the_fit_in_all_processes_at_the_same_batch(tmp_path: Path) -> None:
    """The report of step 0 is complete on all ranks when the second step begins."""
    callback = DivergenceCallback(
        2, sinks=[JsonlSink(tmp_path / "run.jsonl")], alarms=[is_second], on_alarm="stop"
    )
    fit("ddp_spawn", "ddp_spawn", tmp_path, callbacks=[callback, Steps(tmp_path)])
    assert [(tmp_path / f"steps.{rank}").read_text() for rank in range(WORLD)] == ["2", "2"]
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [alarm["layer"] for alarm in json.loads(line)["alarms"]] == ["net.2"]


def work(rank: int, folder: str) -> None:
    meet(rank, WORLD, folder)
    as_launched(rank, WORLD)
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "here"}
    strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    fit("model_parallel", strategy, folder, plugins=TorchElasticEnvironment())


def plain() -> list[dict[str, Any]]:
    """Run the same training as a plain loop with whole batches."""
    model = nn.ModuleDict({"net": net()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = (nn.functional.cross_entropy(model["net"](x), y) for x, y in FOUR)
    return [report.to_dict() for report in plain_loop(model, optimizer, losses)]


@pytest.mark.slow
def test_one_file_says_what_a_plain_loop_would(tmp_path: Path) -> None:
    run_in(WORLD, work, str(tmp_path))
    lines = (tmp_path / "model_parallel.jsonl").read_text().splitlines()
    found, expected = [json.loads(line) for line in lines], plain()
    assert [line["step"] for line in found] == [0, 2]
    for line, report in zip(found, expected, strict=True):
        assert line["coverage"] == 1
        assert line["layers"].keys() == report["layers"].keys()
        for path, reading in report["layers"].items():
            ours = line["layers"][path]
            assert ours["rows_seen"] == SAMPLES
            for name in ("update_cosine", "gradient_cosine", "parameter_cosine", "scale_mean"):
                assert ours[name] == pytest.approx(reading[name], rel=1e-4), name
