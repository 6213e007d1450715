"""Helpers for tests with several ranks: process groups, a model, comparison of reports."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from adiv_monitor import Monitor, StepReport
from adiv_monitor.sinks import MemorySink
from adiv_monitor.step import ranks
from adiv_monitor.step.merge import merge_ranks, prepared
from adiv_monitor.step.outcome import understand
from adiv_monitor.step.run_history import RunHistory

SAMPLES, TOKENS = 8, 5
PATIENCE = timedelta(seconds=120)


def meet(rank: int, world: int, folder: str | Path) -> None:
    """Create a gloo process group of all ranks that call this with the same folder.

    The system chooses the port while it is being bound, so no other program can take it first.
    """
    torch.set_num_threads(1)
    told = Path(folder) / "port"
    port = 0 if rank == 0 else _read(told)
    store = dist.TCPStore(
        "127.0.0.1", port, world, rank == 0, timeout=PATIENCE, wait_for_workers=False
    )
    if rank == 0:
        new = told.with_suffix(".new")
        new.write_text(str(store.port))
        new.rename(told)  # a reader never sees a half-written file
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)


def as_launched(rank: int, world: int) -> None:
    """Set what a launcher sets for its ranks; address and port are required, but unused."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in (names | where).items()}


WAIT = 60.0  # seconds


@contextmanager
def patient() -> Iterator[None]:
    """Make monitors wait up to a minute for each other, so that a slow machine fails no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "PATIENCE", WAIT)
        yield


def contributions_of_ranks(monkeypatch: pytest.MonkeyPatch, world: int) -> list[Any]:
    """Let monitors run as one of several ranks from now on; return the list of what they send."""
    sent: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(ranks.Ranks, "join", lambda self, name: None)

    def report(self: Any, part: Any, complete: object) -> tuple[StepReport, bool]:
        sent.append(part)
        return part.report, False

    monkeypatch.setattr(ranks.Ranks, "report", report)
    return sent


def merged(parts: Sequence[Any], max_rows: int, seed: int = 0) -> StepReport:
    """Return the report that comes of what the ranks sent."""
    world, generator = len(parts), np.random.default_rng(seed)
    own = {
        rank: replace(part, sums=prepared(part.sums, max_rows, world, generator))
        for rank, part in enumerate(parts)
    }
    whole, covered = merge_ranks(own, world, max_rows)
    assert covered == list(range(world))
    return understand(whole, RunHistory())


def run_in(processes: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(rank, *args)` on this many ranks, forked from a process with slow imports done.

    The ranks exit once all have finished, without destroying their process groups: gloo's own
    thread may still use a group that is being destroyed, and crash.
    """
    distributed = ("fsdp", "tensor.parallel", "device_mesh", "optim")
    imported = ["adiv_monitor", "numpy", *(f"torch.distributed.{name}" for name in distributed)]
    imported += ["torch._dynamo"]  # which optimizers import
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
    multiprocessing.start_processes(_run, (work, *args), processes, start_method="forkserver")


def _run(rank: int, work: Callable[..., None], *args: Any) -> None:
    work(rank, *args)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


class FoundBy(dict[int, list[Any]]):
    """Results that ranks saved in `<rank>.pt`, by world size; a world runs on its first access.

    Args:
        work: called on each rank as (rank, world size, folder).
        folder: an empty folder.
    """

    def __init__(self, work: Callable[[int, int, str], None], folder: Path) -> None:
        self._work, self._folder = work, folder

    def __missing__(self, world: int) -> list[Any]:
        place = self._folder / str(world)
        assert not place.exists(), "they failed: see the first test that asked for them"
        place.mkdir()
        run_in(world, self._work, world, str(place))
        self[world] = [torch.load(place / f"{r}.pt", weights_only=False) for r in range(world)]
        return self[world]


def by_processes(worlds: Mapping[str, int]) -> list[Any]:
    """Return the names as test parameters; worlds of more than two ranks are marked slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[slow] * (world > 2)) for name, world in worlds.items()]


def _read(told: Path) -> int:
    end = time.monotonic() + PATIENCE.total_seconds()
    while not told.exists():
        assert time.monotonic() < end, "the first process never came"
        time.sleep(0.01)
    return int(told.read_text())


class Net(nn.Module):
    """A model with many kinds of layers, and branches that only some samples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=0)
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, tokens: Tensor, branches: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + torch.tanh(self.conv(x.mT).mT))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = sum((torch.relu(self.branches[branch](x)) for branch in branches), x)
        logits: Tensor = self.head(x)
        return logits


def make() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = torch.randint(7, (SAMPLES, TOKENS)), torch.randint(4, (SAMPLES, TOKENS))
    targets[:, :2] = torch.where(torch.rand(SAMPLES, 2) < 0.5, -100, targets[:, :2])
    return Net().double(), tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8


def written(monitor: Monitor) -> int:
    (sink,) = monitor._outlet._sinks
    assert isinstance(sink, MemorySink)
    return len(sink.reports)


def numbers(record: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Flatten nested data to one dotted name per number."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        found |= numbers(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return found


OF_ONE_RANK = ("common_share", "silent_share")  # missing with several
# Of the first rank alone.
OWN: dict[str, Any] = {"batch": [], "batch_spread": [], "next_batch": []}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert equality of nested records, to the last digits of float64; ranks' batches differ.

    Of several ranks some measures are missing.
    """
    found, expected = (
        {name: of for name, of in numbers(each | OWN).items() if not name.endswith(OF_ONE_RANK)}
        for each in (found, expected)
    )
    assert not (other := sorted(found.keys() ^ expected.keys())), other
    for name, value in expected.items():
        exact = isinstance(value, int | str | None)
        same = value if exact else pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True)
        assert found[name] == same, name
