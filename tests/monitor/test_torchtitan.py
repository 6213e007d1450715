"""A loop of torchtitan's shape: model parts, an optimizers container, checkpointed compiled blocks.

torchtitan's trainer needs GPUs; this follows it: parts that are run one after the other, one
optimizer for each part, behind one container that is an optimizer itself: a stand-in, or its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import meet, run_in
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW, Optimizer

from adiv_monitor import Monitor, StepReport

STEPS, WIDTH, WORLD = 4, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class OptimizersContainer(Optimizer):
    """One optimizer for each part; it is an optimizer itself, so that hooks may be registered.

    As torchtitan's, it has no learning rate of its own.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        rates = (0.01, 0.02)
        self.optimizers = [
            AdamW(part.parameters(), lr) for part, lr in zip(parts, rates, strict=True)
        ]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


def parts_of(compiled: bool, shard: Callable[[nn.Module], object]) -> list[nn.Module]:
    torch.manual_seed(0)
    parts = [nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(WIDTH, 3))]
    for part in parts:
        for name, block in list(part.named_children()):
            if isinstance(block, Block):
                wrapped: Any = checkpoint_wrapper(block)
                if compiled:
                    wrapped.compile(backend="eager")
                part.register_module(name, wrapped)
                shard(wrapped)
        shard(part)
    return [*parts]


def torchtitans(parts: list[nn.Module]) -> Optimizer:
    """Its own container, with rates by names of parameters."""
    titan = pytest.importorskip("torchtitan.components.optimizer", reason="pip install torchtitan")
    groups = [
        titan.ParamGroupConfig(pattern=p, optimizer_name="AdamW", optimizer_kwargs={"lr": rate})
        for p, rate in (("norm", 0.01), (".", 0.02))
    ]
    config = titan.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    found: Optimizer = config.build(model_parts=parts)
    return found


def train(
    *,
    monitored: bool,
    compiled: bool = False,
    shard: Callable[[nn.Module], object] = lambda part: None,
    half: bool = False,
    contain: Callable[[list[nn.Module]], Optimizer] = OptimizersContainer,
) -> tuple[list[Tensor], list[float], list[StepReport]]:
    """Train; return the weights, the losses, and the reports of one monitor of all parts.

    In half precision, each step has two micro-batches.
    """
    parts = parts_of(compiled, shard)
    optimizers = contain(parts)
    stepped: list[int] = []
    optimizers.register_step_pre_hook(lambda *_: stepped.append(1))
    chance = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    losses, everything = [], nn.ModuleList(parts)
    monitor = None
    if monitored:
        monitor = Monitor(everything, optimizers, every_n_steps=1, on_error="raise")
        monitor.attach()
    for _ in range(STEPS):
        optimizers.zero_grad()
        for _ in range(1 + half):
            x = torch.randn(4, 5, WIDTH, generator=chance)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                for part in parts:
                    x = part(x)
            loss = x.float().square().mean()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
        optimizers.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    assert len(stepped) == STEPS
    own = [getattr(p, "_local_tensor", p).detach().clone() for p in everything.parameters()]
    return own, losses, [] if monitor is None else list(monitor.reports)


def assert_measured(reports: list[StepReport]) -> None:
    assert [report.step for report in reports] == [*range(STEPS)]
    for report in reports:
        assert report.coverage == 1 and not report.unsupported
        assert {*report.learning_rates} == {0.01, 0.02}, "those of all groups"
        assert sum(path.endswith("down") for path in report.layers) == 3
        assert all((reading.update_ratio or 0) > 0 for reading in report.layers.values())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16, accumulated": {"half": True},
    "torchtitan's container": {"contain": torchtitans},
    "compiled": {"compiled": True},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("way", WAYS)
def test_parts_and_their_optimizers_have_one_monitor(way: str) -> None:
    plain, losses, _ = train(monitored=False, **WAYS[way])
    weights, same_losses, reports = train(monitored=True, **WAYS[way])
    assert losses == same_losses and all(map(torch.equal, plain, weights))
    assert_measured(reports)


def work(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    meet(rank, WORLD, folder)
    plain, losses, _ = train(monitored=False, shard=fully_shard)
    weights, same_losses, reports = train(monitored=True, shard=fully_shard)
    assert losses == same_losses and all(map(torch.equal, plain, weights))
    if rank == 0:
        assert_measured(reports)
    (Path(folder) / f"done.{rank}").touch()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
def test_parts_may_be_sharded(tmp_path: Path) -> None:
    run_in(WORLD, work, str(tmp_path))
    assert len([*tmp_path.glob("done.*")]) == WORLD
