"""Several processes that train together: one report speaks for the rows of all of them.

They measure the same steps, and none waits for a process without a monitor.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from setups import free_port
from torch import Tensor, multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import MemorySink

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
SAMPLES, TOKENS = 8, 5


class Net(nn.Module):
    """Some of everything; a branch that only the samples of one sort go through."""

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
    targets[:, :2] = torch.where(torch.rand(SAMPLES, 2) < 0.5, -100, targets[:, :2])  # idle rows
    return Net().double(), tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8


@dataclass(frozen=True)
class Case:
    """A step, as one process takes it or several.

    Attributes:
        parts: samples of each micro-batch, for each process.
        clip: the largest norm of the gradient.
        sync: gradients are averaged after every micro-batch, not only after the last.
        branches: every process has its own.
        options: of the monitor.
    """

    parts: tuple[tuple[int, ...], ...]
    clip: float | None = None
    sync: bool = False
    branches: bool = False
    attention: bool = False
    realised: bool = True


CASES = {
    "halves": Case(((4,), (4,)), attention=True),
    "uneven, clipped": Case(((5,), (3,)), clip=0.1),
    "one has none": Case(((8,), (0,)), realised=False),
    "micro-batches": Case(((2, 2), (1, 3)), realised=False),
    "micro-batches, each averaged": Case(((2, 2), (1, 3)), sync=True, realised=False),
    "a branch of its own": Case(((4,), (4,)), branches=True, realised=False),
}


def step(case: Case, rank: int | None) -> Monitor:
    """Take the step of one of the processes, or of all of them in one."""
    model, tokens, targets = make()
    world = len(case.parts)
    net = model
    if rank is not None:
        net = DistributedDataParallel(model, find_unused_parameters=case.branches)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    every = range(world) if rank is None else (rank,)
    monitor = Monitor(
        net,
        optimizer,
        max_rows=None,
        attention=case.attention,
        realised=case.realised,
        sinks=[MemorySink()],
        on_error="raise",
    )
    with monitor:
        for process in every:
            first = sum(map(sum, case.parts[:process]))
            for i, size in enumerate(case.parts[process]):
                mine = slice(first, first + size)
                first += size
                last = case.sync or i == len(case.parts[process]) - 1
                alone = nullcontext() if rank is None or last else net.no_sync()
                with alone:
                    branch = {"branches": (process,)} if case.branches else {}
                    loss = loss_of(net(tokens[mine], **branch), targets[mine])
                    (loss * (1 if rank is None else world)).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return monitor


def spawn(function: Callable[..., None], world: int, folder: Path) -> None:
    multiprocessing.spawn(function, (world, free_port(), str(folder)), nprocs=world)


def begin(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)


def take_steps(rank: int, world: int, port: int, folder: str) -> None:
    begin(rank, world, port)
    found = {}
    for name, case in CASES.items():
        if len(case.parts) == world:
            monitor = step(case, rank)
            sink = monitor._sinks[0]
            assert isinstance(sink, MemorySink)
            found[name] = monitor.latest, len(sink.reports)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def numbers(record: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Nested data with one name for each number."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        found |= numbers(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal, but for what the gradient was multiplied by on its way."""
    found, expected = (
        {name: n for name, n in numbers(x).items() if "gradient_factor" not in name}
        for x in (found, expected)
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        exact = isinstance(value, int | str | None)
        same = value if exact else pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True)
        assert found[name] == same, name


def assert_speaks_for_all(report: StepReport, name: str) -> None:
    expected = step(CASES[name], None).latest
    assert expected is not None
    assert_same(report.to_dict(quantiles=True), expected.to_dict(quantiles=True))


def test_the_report_is_that_of_one_process_with_all_rows(tmp_path: Path) -> None:
    spawn(take_steps, 2, tmp_path)
    first, second = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(2))
    for name in CASES:
        assert first[name][0] == second[name][0], "all processes have the report"
        assert (first[name][1], second[name][1]) == (1, 0), "the first writes it"
        assert_speaks_for_all(first[name][0], name)
