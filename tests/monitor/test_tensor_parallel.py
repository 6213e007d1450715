"""Tensor parallelism: ranks with parts of layers report what one unsharded process reports."""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import FoundBy, assert_same, by_processes, meet, patient, written
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor import Monitor
from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.weights.shards import Peers
from adiv_monitor.features.features import DenseFeatures
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.whole import Whole
from adiv_monitor.maths.sums import About, Array, Evidence, LayerSums, Partition, Sampled, Vector
from adiv_monitor.report import StepReport
from adiv_monitor.sinks import MemorySink
from adiv_monitor.step import assembly, merge_rows
from adiv_monitor.step.merge_ranks import prepared
from adiv_monitor.step.parameter_steps import PieceNumbers
from adiv_monitor.step.rank_contribution import make_contribution
from adiv_monitor.step.rows_across_ranks import NOT_ALIKE, deal, partition
from adiv_monitor.step.transfer import Flags, StepSums
from adiv_monitor.step.unsharded import WHY_NOT

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")

SAMPLES, TOKENS, WORDS = 8, 8, 11


class Block(nn.Module):
    """Attention and two layers, as they are split over ranks."""

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
        heads = [
            map_(y).unflatten(-1, (-1, 2)).transpose(1, 2) for map_ in (self.q, self.k, self.v)
        ]
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
    """A step, taken by one process or by several ranks.

    Attributes:
        parallel: number of ranks that hold parts of one model; further ranks are replicas of these.
        world: number of ranks.
        sequence: norms are split by tokens.
        spread: the block's activations are partitioned, too, from its first layer to its last.
        sharded: replicas hold parts of all parameters (FSDP2).
        parts: samples of each micro-batch, for each replica.
        optimizer: makes the optimizer.
        clip: the largest norm of the gradient.
        turn: number of the turn if layers are measured in turn, three modules per step.
    """

    world: int
    parts: tuple[tuple[int, ...], ...] = ((8,),)
    parallel: int = 2
    sequence: bool = False
    spread: bool = False
    sharded: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    clip: float | None = None
    turn: int | None = None


CASES = {
    "one, as a first trial": Case(1, parallel=1),
    "two, AdamW": Case(2),
    "two, SGD": Case(2, optimizer=torch.optim.SGD),
    "two, norms by tokens": Case(2, sequence=True),
    "two, norms by tokens, SGD, clipped": Case(
        2, sequence=True, optimizer=torch.optim.SGD, clip=0.1
    ),
    "two, micro-batches": Case(2, parts=((3, 5),)),
    "two, norms by tokens, micro-batches": Case(2, parts=((3, 5),), sequence=True),
    "two, all is spread": Case(2, spread=True),
    "two, the first of turns": Case(2, turn=0),
    "four": Case(4, parallel=4),
    "four, norms by tokens": Case(4, parallel=4, sequence=True),
    "four, two replicas": Case(4, parts=((5,), (3,))),
    "four, two replicas, norms by tokens": Case(4, parts=((2, 2), (1, 3)), sequence=True),
    "four, sharded": Case(4, parts=((5,), (3,)), sharded=True),
    "four, sharded, norms by tokens": Case(4, parts=((2, 2), (1, 3)), sequence=True, sharded=True),
}


def split(model: Net, mesh: Any, case: "Case") -> None:
    """Partition the model across ranks, as in torch's tutorials."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module
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
    if case.spread:
        plan["embed"] = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        for path in ("block.out", "block.down", "block.up"):
            plan[path] = type(plan[path])(use_local_output=False)
    if case.sequence:
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
    if case.spread:
        distribute_module(model, mesh)  # replicates everything that the plan does not name


def make(dtype: torch.dtype = torch.float64) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, targets = (torch.randint(WORDS, (SAMPLES, TOKENS)) for _ in range(2))
    targets[:, :2] = torch.where(torch.rand(SAMPLES, 2) < 0.5, -100, targets[:, :2])  # no gradient
    return Net().to(dtype), tokens, targets


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found  # type: ignore[operator]


@patient()
def step(case: Case, rank: int | None, *, monitored: bool = True) -> tuple[Monitor, nn.Module]:
    """Take a step of one rank, or of all ranks in one process."""
    model, tokens, targets = make()
    replicas, group = case.world // case.parallel, None
    if rank is not None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicas", "parts")
        mesh = init_device_mesh("cpu", (replicas, case.parallel), mesh_dim_names=names)
        split(model, mesh["parts"], case)
        group = mesh["replicas"].get_group()
        if case.sharded:
            fully_shard(model.block, mesh=mesh["replicas"])
            fully_shard(model, mesh=mesh["replicas"])
            group = None
    if case.sequence:
        model.scale.requires_grad_(False)
    optimizer = case.optimizer(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"max_rows": None}
    options["layers_per_step"] = None if case.turn is None else 3
    monitor = Monitor(model, optimizer, sinks=[MemorySink()], on_error="raise", **options)
    monitor.load_state_dict({**monitor.state_dict(), "turns": case.turn or 0})
    if monitored:
        monitor.attach()
    else:
        monitor.close()
    for replica in range(replicas) if rank is None else (rank // case.parallel,):
        first = sum(map(sum, case.parts[:replica]))
        for size in case.parts[replica]:
            mine = slice(first, first + size)
            first += size
            loss = loss_of(model(tokens[mine]), targets[mine])
            # FSDP averages the replicas' gradients.
            (loss * (replicas if case.sharded and rank is not None else 1)).backward()
    for p in model.parameters() if group is not None and replicas > 1 else ():
        if p.grad is not None:
            dist.all_reduce(local(p.grad), group=group)
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    monitor.close()
    return monitor, model


def train(rank: int, **options: Any) -> Any:
    """Take steps of one of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    model, tokens, targets = make(options.pop("dtype", torch.float64))
    split(model, init_device_mesh("cpu", (2,)), Case(2))
    return some_steps(model, lambda: loss_of(model(tokens), targets), **options)


def few_rows(rank: int) -> Any:
    return train(rank, max_rows=8, on_error="raise")


def half_precision(rank: int) -> Any:
    return train(rank, dtype=torch.bfloat16, on_error="raise", max_rows=128)


def all_that_can_be_asked(rank: int) -> Any:
    return train(rank, attainable=True, realised=True, attention=True, on_error="raise")


def one_without_a_monitor(rank: int) -> Any:
    return train(rank, monitored=rank == 0)


def one_that_looks_at_others(rank: int) -> Any:
    return train(rank, max_rows=8 + rank)


def one_that_is_off_in_one(rank: int) -> Any:
    return train(rank, off="block.up" if rank else "")


class Gated(nn.Module):
    """A model with replicated weights: backward leaves the gradient's columns on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.gate(x)) * self.up(x))
        return found


class Tokens(nn.Module):
    """A norm that each rank computes for its own tokens, with code that sums its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return found


def gated(rank: int | None, **options: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, parallel

    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(6, 8, dtype=torch.float64)
    if rank is not None:
        mesh = init_device_mesh("cpu", (2,))
        gate = parallel.ColwiseParallel(use_local_output=False)
        plan = {"gate": gate, "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, mesh, plan)
        distribute_module(model, mesh)
        x = DTensor.from_local(x, mesh, [Replicate()])
    return some_steps(model, lambda: model(x).square().sum(), **options)


def tokens_of_each(rank: int | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, parallel

    torch.manual_seed(0)
    model, x = Tokens().double(), torch.randn(3, 4, 8, dtype=torch.float64)
    if rank is not None:
        tokens = Shard(1)
        plan = {
            "up": parallel.ColwiseParallel(input_layouts=tokens),
            "down": parallel.RowwiseParallel(output_layouts=tokens),
        }
        parallel.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        x = x[:, 2 * rank : 2 * rank + 2]

    def add_up() -> None:
        for p in model.norm.parameters() if rank is not None else ():
            dist.all_reduce(p.grad)

    return some_steps(model, lambda: model(x).square().sum(), add_up)


def odd_tokens(rank: int | None) -> Any:
    """Train with different numbers of tokens per rank, in two micro-batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor, parallel

    torch.manual_seed(0)
    model, x = Tokens().double(), torch.randn(6, 5, 8, dtype=torch.float64)
    mesh, spread = init_device_mesh("cpu", (2,)), {"use_local_output": False}
    plan = {
        "norm": parallel.SequenceParallel(**spread),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1), **spread),
        "down": parallel.RowwiseParallel(output_layouts=Shard(1), **spread),
    }
    parallel.parallelize_module(model, mesh, plan)
    halves = [distribute_tensor(half, mesh, [Shard(1)]) for half in x.split(3)]

    def loss() -> Tensor:
        model(halves[0]).square().sum().backward()
        return cast(Tensor, model(halves[1]).square().sum())

    return some_steps(model, loss, max_rows=8)


def frozen_in_one(rank: int) -> Any:
    """Freeze different weights, but as many, on each rank."""
    from torch.distributed.device_mesh import init_device_mesh

    model, tokens, targets = make()
    split(model, init_device_mesh("cpu", (2,)), Case(2))
    (model.head if rank else model.block.down).weight.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "PATIENCE", 3.0)  # the ranks wait in vain
        return some_steps(model, lambda: loss_of(model(tokens), targets))


def some_steps(
    model: nn.Module,
    loss: Callable[[], Tensor],
    after: Callable[[], object] = lambda: None,
    *,
    monitored: bool = True,
    off: str = "",
    **options: Any,
) -> Any:
    """Take two steps measured with all rows; return reports, warnings and seconds."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    begin = time.monotonic()
    options = {"max_rows": None, **options}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monitor = Monitor(model, optimizer, every_n_steps=1, **options)
        if monitored:
            monitor.attach()
        else:
            monitor.close()
        if off:
            monitor._failures.switched_off[off] = "a test"
            monitor._controller.disarm()
            monitor._controller.arm()
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            after()
            optimizer.step()
        monitor.close()
    said = [str(w.message) for w in warned if "adiv_monitor" in str(w.message)]
    return list(monitor.reports), said, time.monotonic() - begin


def gated_alone(rank: int) -> Any:
    return gated(rank, monitored=rank == 0)


def gated_off_in_one(rank: int) -> Any:
    return gated(rank, off="up" if rank else "")


def one_group_that_looks_at_others(rank: int) -> Any:
    """Train two replicas, on one of which the ranks have chosen different rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["parts"], plan)
    torch.manual_seed(rank // 2)
    x = torch.randn(16, 4, dtype=torch.float64)

    def average() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(local(parameter.grad), group=mesh["replicas"].get_group())

    options = {"max_rows": 8 + (rank == 3)}
    return some_steps(model, lambda: model(x).square().sum(), average, **options)


TASKS: dict[int, tuple[Callable[[int], Any], ...]] = {
    1: (),
    2: (
        gated,
        gated_alone,
        gated_off_in_one,
        tokens_of_each,
        odd_tokens,
        frozen_in_one,
        few_rows,
        half_precision,
        all_that_can_be_asked,
        one_without_a_monitor,
        one_that_looks_at_others,
        one_that_is_off_in_one,
    ),
    4: (one_group_that_looks_at_others,),
}
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
    for task in TASKS[world]:
        found[task.__name__] = task(rank)
        dist.barrier()  # else a monitor of the next case could join this one
    torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """Return the ranks' results by world size and rank."""
    return FoundBy(work, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", by_processes({name: c.world for name, c in CASES.items()}))
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


SPREAD = {f"block.{name}" for name in ("q", "k", "v", "out", "up", "down")} | {"embed", "head"}
WHOLE = {"scale", "block.before", "block.between"}


def test_few_rows_are_those_of_all_processes(found: dict[int, list[Found]]) -> None:
    """All ranks sample the same rows, and each of these counts once."""
    of_all, _, _ = found[2][0]["all_that_can_be_asked"]
    reports, said, _ = found[2][0]["few_rows"]
    assert not said
    for report, expected in zip(reports, of_all, strict=True):
        assert report.layers.keys() == SPREAD | WHOLE
        for path, reading in report.layers.items():
            assert (reading.rows_seen, reading.rows_total) == (8, 64), path
            whole = expected.layers[path]
            for name in ("scale_mean", "descent", "effective_lr"):
                if reading.standard_error.get(name, 0.0) == 0:
                    value = getattr(whole, name)
                    assert getattr(reading, name) == pytest.approx(value, nan_ok=True), path
            error = reading.standard_error["update_cosine"]
            assert 0 < error < 1, path
            assert abs(reading.update_cosine - whole.update_cosine) < 5 * error, path


def test_in_half_precision(found: dict[int, list[Found]]) -> None:
    reports, said, _ = found[2][0]["half_precision"]
    of_all, _, _ = found[2][0]["all_that_can_be_asked"]
    assert not said
    for report, expected in zip(reports, of_all, strict=True):
        assert report.coverage == 1
        assert report.notes == ()
        for path, reading in report.layers.items():
            value = expected.layers[path].gradient_cosine
            assert reading.gradient_cosine == pytest.approx(value, abs=0.05), path


def test_a_note_names_measures_that_need_all_rows(found: dict[int, list[Found]]) -> None:
    reports, _, _ = found[2][0]["all_that_can_be_asked"]
    for report in reports:
        for path, reading in report.layers.items():
            assert (reading.attainable_cosine is None) == (path in SPREAD), path
        assert any("attainable_cosine" in note for note in report.notes)
        assert any("not a plain tensor" in note for note in report.notes)


def test_where_one_has_no_monitor(found: dict[int, list[Found]]) -> None:
    """No rank waits for it, and readings that need all ranks are reported as missing."""
    reports, _, seconds = found[2][0]["one_without_a_monitor"]
    assert seconds < 10
    for report in reports:
        assert report.layers.keys() == WHOLE
        assert report.unsupported.keys() == SPREAD
        assert set(report.unsupported.values()) == {WHY_NOT}


def test_where_processes_look_at_different_rows(found: dict[int, list[Found]]) -> None:
    for own in found[2]:
        reports, _, _ = own["one_that_looks_at_others"]
        for report in reports:
            assert not report.layers
            assert set(report.unsupported.values()) == {NOT_ALIKE}


def test_where_a_layer_is_off_in_one(found: dict[int, list[Found]]) -> None:
    for own in found[2]:
        reports, _, seconds = own["one_that_is_off_in_one"]
        assert seconds < 10
        for report in reports:
            assert report.layers.keys() == (SPREAD | WHOLE) - {"block.up"}
            assert report.unsupported.keys() == {"block.up"}


@pytest.mark.parametrize("count", [2, 4])
def test_what_was_dealt_out_makes_one_sample(count: int) -> None:
    """Each row of a group has its own key, and groups are represented equally."""
    chance, world, rows, most = np.random.default_rng(0), 4, 200, 64
    chosen = dict.fromkeys(range(world // count), 0)
    for step_number in range(100):
        kept = []
        for rank in range(world):
            group, place = divmod(rank, count)
            shared = Partition(count * group, place, count, most, rows)
            of_each = most // count, rows // count
            layer = LayerSums(
                About("linear"),
                Sampled(*of_each, partition=shared),
                (Vector.G,),
                np.ones((of_each[0], 1)),
                Evidence(0.0),
                scale=np.full(of_each[0], float(group)),
            )
            nothing: PieceNumbers[Array] = PieceNumbers()
            part = make_contribution(
                StepSums({"x": layer}, {}, Flags(), nothing, nothing, {}),
                {"x": ({}, False)},
                {},
                number=step_number,
                unreached={},
                notes=[],
                keeps_gradient=True,
            )
            kept.append(prepared(part, most, world, chance).layers["x"])
        keys = np.concatenate([x.sampled.keys for x in kept if x.sampled.keys is not None])
        assert len(set(keys)) == len(keys)
        whole = merge_rows.merge(kept, most, chance)
        assert whole.sampled.seen <= most
        assert whole.sampled.total == world // count * rows
        for group in chosen:
            chosen[group] += int((whole.scale == group).sum())
    assert sum(chosen.values()) > 0.95 * 100 * most
    assert max(chosen.values()) - min(chosen.values()) < 5 * np.sqrt(100 * most)


@pytest.mark.parametrize("most", [None, 5])
def test_every_row_is_dealt_to_one(most: int | None) -> None:
    """Rows are partitioned across ranks, also if not divisible, and their statistics with them."""
    found: dict[str, list[float]] = defaultdict(list)
    for place in range(2):
        calls = []
        for first, size in ((0, 3), (3, 6)):
            rows = Rows((size,), None if most is None else np.arange(min(size, most)))
            call = Call(None, rows)
            every = torch.arange(float(first), first + size)
            kept = every[: len(every) if most is None else most]
            call.look(
                DenseFeatures(kept[:, None, None]), kept[:, None], Whole(every, 1.0, every.sum())
            )
            call.gradient, call.squares = kept[:, None], every[None]
            calls.append(call)
        deal(calls, Dealer(place))
        of_all = partition(calls, Dealer(place), all_participate=True)
        assert of_all == Partition(0, place, 2, 9 if most is None else 8, 9)
        for call in calls:
            assert isinstance(call.features, DenseFeatures) and call.features.phi is not None
            assert call.whole is not None and call.whole.weight_square is not None
            assert call.total == len(call.whole.weight_square)
            found["z"] += call.z.flatten().tolist()
            found["phi"] += call.features.phi.flatten().tolist()
            found["squares"] += call.whole.weight_square.tolist()
            found["sums"].append(float(call.whole.weight_sum))  # type: ignore[arg-type]
        # The keys that `prepared` draws for them.
        assert sum(len(call.z) for call in calls) == len(range(place, of_all.seen, 2))
    seen = [0.0, 1, 2, *range(3, 3 + (most or 6))]
    assert sorted(found["z"]) == sorted(found["phi"]) == seen
    assert sorted(found["squares"]) == list(range(9))
    assert sum(found["sums"]) == sum(range(9))


class Dealer(Peers):
    """One of two ranks, without the other."""

    def __init__(self, place: int) -> None:
        super().__init__(None, {})
        object.__setattr__(self, "_place", place)

    count = property(lambda self: 2)  # type: ignore[assignment]
    place = property(lambda self: self._place)  # type: ignore[assignment]
    first = property(lambda self: 0)  # type: ignore[assignment]


@pytest.mark.parametrize("task", [gated, tokens_of_each])
def test_whatever_lies_where(
    task: Callable[[int | None], Any], found: dict[int, list[Found]]
) -> None:
    """Gradients may lie on other ranks than parameters, and a layer may have rows of one rank."""
    expected, _, _ = task(None)
    for own in found[2]:
        reports, said, _ = own[task.__name__]
        assert not said
        assert len(reports) == len(expected) == 2
        for report, whole in zip(reports, expected, strict=True):
            assert_same(report.to_dict(quantiles=True), whole.to_dict(quantiles=True))


@pytest.mark.parametrize("task", [gated_alone, gated_off_in_one])
def test_no_gradient_is_put_together_by_one_alone(
    task: Callable[[int], Any], found: dict[int, list[Found]]
) -> None:
    reports, said, seconds = found[2][0][task.__name__]
    assert not said
    assert seconds < 10
    for report in reports:
        missing = {"up"} if task is gated_off_in_one else {"gate", "up", "down"}
        assert report.unsupported.keys() == missing


@pytest.mark.slow
def test_a_group_with_nothing_to_put_together_keeps_no_other_from_it(
    found: dict[int, list[Found]],
) -> None:
    for own in found[4]:
        reports, _, _ = own["one_group_that_looks_at_others"]
        assert len(reports) == 2
        for report in reports:
            assert {path: x.rows_total for path, x in report.layers.items()} == {"0": 16, "2": 16}


def test_few_rows_where_processes_have_more_or_less_of_them(found: dict[int, list[Found]]) -> None:
    reports, said, _ = found[2][0]["odd_tokens"]
    assert not said
    for report in reports:
        assert report.layers.keys() == {"norm", "up", "down"}
        assert not report.unsupported
        for reading in report.layers.values():
            assert (reading.rows_seen, reading.rows_total) == (8, 30)


def test_processes_that_measure_other_parameters_put_none_together(
    found: dict[int, list[Found]],
) -> None:
    for own in found[2]:
        reports, _, _ = own["frozen_in_one"]
        for report in reports:
            assert report.layers.keys() == WHOLE
            assert WHY_NOT in report.unsupported.values()
