"""Sharded parameters (FSDP2): what several processes say is what one with all of it says."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import assert_same, loss_of, make, meet, written
from torch import Tensor, multiprocessing, nn

from adiv_monitor import Monitor
from adiv_monitor.sinks import MemorySink

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


@dataclass(frozen=True)
class Case:
    """A step, as one process takes it or several.

    Attributes:
        parts: samples of each micro-batch, for each process.
        optimizer: makes the optimizer.
        sync: gradients are averaged after every micro-batch, not only after the last.
        clip: the largest norm of the gradient.
        nested: modules inside are sharded on their own too.
        replicas: groups of processes that hold the same.
    """

    parts: tuple[tuple[int, ...], ...]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    sync: bool = False
    clip: float | None = None
    nested: bool = True
    replicas: int = 1
    attainable: bool = False


CASES = {
    "halves, AdamW": Case(((4,), (4,)), attainable=True),
    "halves, SGD": Case(((4,), (4,)), torch.optim.SGD),
    "uneven, one unit, clipped": Case(((5,), (3,)), clip=0.1, nested=False),
    "micro-batches": Case(((2, 2), (1, 3))),
    "micro-batches, each averaged": Case(((2, 2), (1, 3)), sync=True),
    "four": Case(((3,), (2,), (1,), (2,))),
    "four, two replicas": Case(((3,), (2,), (1,), (2,)), replicas=2),
}


def shard(model: nn.Module, case: Case) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if case.replicas > 1:
        names = ("replicate", "shard")
        sizes = (case.replicas, world // case.replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for inner in (model.attend, model.branches[0], model.head) if case.nested else ():
        fully_shard(inner, mesh=mesh)
    fully_shard(model, mesh=mesh)


def step(case: Case, rank: int | None, *, monitored: bool = True) -> tuple[Monitor, nn.Module]:
    """Take two steps of one of the processes, or of all of them in one; the second is measured."""
    model, tokens, targets = make()
    world = len(case.parts)
    if rank is not None:
        shard(model, case)
    optimizer = case.optimizer(model.parameters(), lr=0.01)
    every = range(world) if rank is None else (rank,)
    options: dict[str, Any] = {"max_rows": None, "attainable": case.attainable}
    monitor = Monitor(model, optimizer, sinks=[MemorySink()], on_error="raise", **options)
    if monitored:
        monitor.attach()
    for process in every:
        first = sum(map(sum, case.parts[:process]))
        for i, size in enumerate(case.parts[process]):
            mine = slice(first, first + size)
            first += size
            if rank is not None:
                last = i == len(case.parts[process]) - 1
                model.set_requires_gradient_sync(case.sync or last)
            loss = loss_of(model(tokens[mine]), targets[mine])
            (loss * (1 if rank is None else world)).backward()
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    monitor.close()
    return monitor, model


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() for p in model.parameters()]


Found = dict[str, Any]


def work(rank: int, world: int, folder: str) -> None:
    meet(rank, world, folder)
    found: Found = {}
    for name, case in CASES.items():
        if len(case.parts) == world:
            monitor, model = step(case, rank)
            _, other = step(case, rank, monitored=False)
            pairs = zip(weights(model), weights(other), strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
            found[name] = monitor.latest, written(monitor), same
    if world == 2:
        found |= {task.__name__: task(rank) for task in TASKS}
    dist.destroy_process_group()
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """What the processes found, by their number and rank."""
    folder = tmp_path_factory.mktemp("processes")
    for world in (2, 4):
        (folder / str(world)).mkdir()
        multiprocessing.spawn(work, (world, str(folder / str(world))), nprocs=world)
    return {
        world: [
            torch.load(folder / str(world) / f"{rank}.pt", weights_only=False)
            for rank in range(world)
        ]
        for world in (2, 4)
    }


TASKS: tuple[Callable[[int], Any], ...] = ()


@pytest.mark.parametrize("name", CASES)
def test_the_report_is_that_of_one_process_with_all_of_it(
    name: str, found: dict[int, list[Found]]
) -> None:
    reports, counts, same = zip(*(own[name] for own in found[len(CASES[name].parts)]), strict=True)
    assert all(same), "the training is bit-identical"
    assert all(report == reports[0] for report in reports), "all processes have it"
    assert counts == (1, *(0 for _ in reports[1:])), "the first writes it"
    expected = step(CASES[name], None)[0].latest
    assert expected is not None
    assert reports[0].coverage == 1
    assert_same(reports[0].to_dict(quantiles=True), expected.to_dict(quantiles=True))
