"""Tensor parallelism: what processes with parts of the layers say is what one with all of it says."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import assert_same, found_by, meet, written
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import MemorySink

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")

SAMPLES, TOKENS, WORDS = 8, 8, 11


class Block(nn.Module):
    """Attention and two layers, as they are split over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, 8)
        self.between = nn.RMSNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = [map_(y).unflatten(-1, (-1, 2)).transpose(1, 2) for map_ in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Net(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embed(tokens)) * self.scale)
        return logits


@dataclass(frozen=True)
class Case:
    """A step, as one process takes it or several.

    Attributes:
        parallel: how many processes hold parts of one model; more are replicas of these.
        world: how many processes there are.
        sequence: norms are split by tokens.
        sharded: replicas hold parts of all parameters (FSDP2).
        parts: samples of each micro-batch, for each replica.
        optimizer: makes the optimizer.
        clip: the largest norm of the gradient.
        options: of the monitor.
    """

    world: int
    parts: tuple[tuple[int, ...], ...] = ((8,),)
    parallel: int = 2
    sequence: bool = False
    sharded: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    clip: float | None = None
    attainable: bool = False
    turn: int | None = None


CASES = {
    "two, AdamW": Case(2),
    "two, SGD": Case(2, optimizer=torch.optim.SGD),
    "two, norms by tokens": Case(2, sequence=True),
    "two, norms by tokens, SGD, clipped": Case(
        2, sequence=True, optimizer=torch.optim.SGD, clip=0.1
    ),
    "two, micro-batches": Case(2, parts=((3, 5),)),
    "two, norms by tokens, micro-batches": Case(2, parts=((3, 5),), sequence=True),
    "two, the first of turns": Case(2, turn=0),
    "four": Case(4, parallel=4),
    "four, norms by tokens": Case(4, parallel=4, sequence=True),
    "four, two replicas": Case(4, parts=((5,), (3,))),
    "four, two replicas, norms by tokens": Case(4, parts=((2, 2), (1, 3)), sequence=True),
    "four, sharded": Case(4, parts=((5,), (3,)), sharded=True),
    "four, sharded, norms by tokens": Case(4, parts=((2, 2), (1, 3)), sequence=True, sharded=True),
}


def split(model: Net, mesh: Any, *, sequence: bool) -> None:
    """Give each process its parts, as torch's tutorials do."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {
        **dict.fromkeys(("block.q", "block.k", "block.v", "block.up"), ColwiseParallel()),
        **dict.fromkeys(("block.out", "block.down"), RowwiseParallel()),
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        tokens = Shard(1)
        plan |= {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "block.before": SequenceParallel(),
            "block.between": SequenceParallel(),
            **dict.fromkeys(
                ("block.q", "block.k", "block.v", "block.up"),
                ColwiseParallel(input_layouts=tokens),
            ),
            **dict.fromkeys(("block.out", "block.down"), RowwiseParallel(output_layouts=tokens)),
            "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)


def make(dtype: torch.dtype = torch.float64) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = (torch.randint(WORDS, (SAMPLES, TOKENS)) for _ in range(2))
    targets[:, :2] = torch.where(torch.rand(SAMPLES, 2) < 0.5, -100, targets[:, :2])  # idle rows
    return Net().to(dtype), tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found  # type: ignore[operator]


def step(case: Case, rank: int | None, *, monitored: bool = True) -> tuple[Monitor, nn.Module]:
    """Take a step of one of the processes, or of all of them in one."""
    model, tokens, targets = make()
    replicas, group = case.world // case.parallel, None
    if rank is not None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicas", "parts")
        mesh = init_device_mesh("cpu", (replicas, case.parallel), mesh_dim_names=names)
        split(model, mesh["parts"], sequence=case.sequence)
        group = mesh["replicas"].get_group()
        if case.sharded:
            fully_shard(model.block, mesh=mesh["replicas"])
            fully_shard(model, mesh=mesh["replicas"])
            group = None
    if case.sequence:
        model.scale.requires_grad_(False)
    optimizer = case.optimizer(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"max_rows": None, "attainable": case.attainable}
    options["layers_per_step"] = None if case.turn is None else 3
    monitor = Monitor(model, optimizer, sinks=[MemorySink()], on_error="raise", **options)
    monitor.load_state_dict({**monitor.state_dict(), "turns": case.turn or 0})
    if monitored:
        monitor.attach()
    for replica in range(replicas) if rank is None else (rank // case.parallel,):
        first = sum(map(sum, case.parts[:replica]))
        for size in case.parts[replica]:
            mine = slice(first, first + size)
            first += size
            loss = loss_of(model(tokens[mine]), targets[mine])
            # FSDP takes the mean of what replicas leave.
            (loss * (replicas if case.sharded and rank is not None else 1)).backward()
    for p in model.parameters() if group is not None and replicas > 1 else ():
        if p.grad is not None:
            dist.all_reduce(local(p.grad), group=group)
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    monitor.close()
    return monitor, model


Found = dict[str, Any]


def work(rank: int, world: int, folder: str) -> None:
    meet(rank, world, folder)
    found: Found = {}
    for name, case in CASES.items():
        if case.world == world:
            monitor, model = step(case, rank)
            _, other = step(case, rank, monitored=False)
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            same = all(torch.equal(local(a), local(b)) for a, b in pairs)
            found[name] = monitor.latest, written(monitor), same
    dist.destroy_process_group()
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """What the processes found, by their number and rank."""
    return found_by(work, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CASES)
def test_the_report_is_that_of_one_process_with_all_of_it(
    name: str, found: dict[int, list[Found]]
) -> None:
    reports, counts, same = zip(*(own[name] for own in found[CASES[name].world]), strict=True)
    assert all(same), "the training is bit-identical"
    assert all(report == reports[0] for report in reports), "all processes have it"
    assert counts == (1, *(0 for _ in reports[1:])), "the first writes it"
    expected = step(CASES[name], None)[0].latest
    assert isinstance(expected, StepReport)
    assert reports[0].coverage == 1
    assert_same(reports[0].to_dict(quantiles=True), expected.to_dict(quantiles=True))
