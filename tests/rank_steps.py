"""Steps of several ranks together, or of one process with the rows of all."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from processes import loss_of, make, patient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adiv_monitor import Monitor
from adiv_monitor.sinks import MemorySink

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ADAM, SGD = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.1)
Look = Callable[[int, Any, Monitor], object]


@dataclass(frozen=True)
class Case:
    """A step, taken by one process or by several ranks.

    Attributes:
        parts: samples of each micro-batch, for each rank.
        optimizer: makes the optimizer.
        clip: the largest norm of the gradient.
        sync: gradients are averaged after every micro-batch, not only after the last.
        branches: every rank uses a branch of its own.
        turn: number of the turn if layers are measured in turn, three modules per step.
        shards: the ranks have shards of the parameters (FSDP2).
        nested: inner modules are sharded separately, too.
        replicas: number of groups of ranks with equal shards.
        together: replicas, too, average gradients after every micro-batch, if `sync` is set.
    """

    parts: tuple[tuple[int, ...], ...]
    optimizer: Optimizers = ADAM
    clip: float | None = None
    sync: bool = False
    branches: bool = False
    turn: int | None = None
    shards: bool = False
    nested: bool = True
    replicas: int = 1
    together: bool = True


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


@patient()
def take(case: Case, rank: int | None, *, monitored: bool = True) -> tuple[Monitor, nn.Module]:
    """Take the step of one rank, or of all ranks in one process."""
    model, tokens, targets = make()
    world, net = len(case.parts), model
    if rank is not None and case.shards:
        shard(model, case)
    elif rank is not None:
        net = DistributedDataParallel(model, find_unused_parameters=case.branches)
    optimizer = case.optimizer(model.parameters())
    options: dict[str, Any] = {"max_rows": None, "sinks": [MemorySink()], "on_error": "raise"}
    options["layers_per_step"] = None if case.turn is None else 3
    monitor = Monitor(net, optimizer, **options)
    monitor.load_state_dict({**monitor.state_dict(), "turns": case.turn or 0})
    monitor.attach() if monitored else monitor.close()
    for process in range(world) if rank is None else (rank,):
        first = sum(map(sum, case.parts[:process]))
        for i, size in enumerate(case.parts[process]):
            mine = slice(first, first + size)
            first += size
            last = i == len(case.parts[process]) - 1
            waits = nullcontext()
            if rank is not None and case.shards:
                model.set_requires_gradient_sync(case.sync or last)
                model.set_requires_all_reduce(case.together or last)
            elif rank is not None and not (case.sync or last):
                waits = net.no_sync()
            with waits:
                branch = {"branches": (process,)} if case.branches else {}
                loss = loss_of(net(tokens[mine], **branch), targets[mine])
                (loss * (1 if rank is None else world)).backward()
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    monitor.close()
    return monitor, model


def small(rank: int | None, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """Return a model and the rows of one of two ranks, or of both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    data = torch.randn(8, 5, dtype=torch.float64).to(dtype)
    return model, data if rank is None else data[4 * rank : 4 * rank + 4]


def alone(model: nn.Module) -> nn.Module:
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2], **options)
    fully_shard(model, **options)
    return model


def nothing(step: int, of: object, monitor: Monitor) -> None:
    """Do nothing."""


def train(
    rank: int | None,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    steps: int = 1,
    *,
    optimizer: Optimizers = SGD,
    see: Look = nothing,
    between: Look = nothing,
    after: Look = nothing,
    off: Sequence[str] = (),
    turn: int = 0,
    monitored: bool = True,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Monitor:
    """Train the small model on the rows of one rank, or of both in one process.

    Args:
        rank: None for both.
        wrap: wraps the model of a rank.
        steps: their number; all are measured.
        optimizer: makes the optimizer.
        see: called with the number of the step, the loss and the monitor, before the backward pass.
        between: called with the wrapped model, between the backward pass and the step.
        after: called with the wrapped model, after the step.
        off: paths of layers that have failed.
        turn: of layers that are measured in turn.
        monitored: whether this rank is.
        dtype: of the model and its data.
        options: those of the monitor.
    """
    model, x = small(rank, dtype)
    net = model if rank is None else wrap(model)
    own = optimizer(model.parameters())
    monitor = Monitor(net, own, **{"every_n_steps": 1, "on_error": "raise", **options})
    monitor.load_state_dict({**monitor.state_dict(), "turns": turn})
    if not monitored:
        monitor.close()
    with monitor if monitored else nullcontext():
        if off:
            monitor._failures.switched_off.update(dict.fromkeys(off, "a test"))
            monitor._controller.disarm()
            monitor._controller.arm()
        for step in range(steps):
            own.zero_grad()
            loss = net(x).double().square().mean()
            see(step, loss, monitor)
            loss.backward()
            between(step, net, monitor)
            own.step()
            after(step, net, monitor)
    return monitor
