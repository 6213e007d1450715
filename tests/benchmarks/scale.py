"""The cost of a measured step by size: a model, compared with counts, and evaluated at scale.

Counts are of operations on linear layers n → m with bias: floating-point operations of matrix
products, bytes read and written by operations, bytes held beside the training, kernels, bytes sent
by ranks. Counts are the same on every machine; `monitor.py` measures times. Every formula of the
model is in `cost`, and is compared with a count.

Expected before: within 10 % of the counts, but 20 % for bytes held, where small tensors count.

    python tests/benchmarks/scale.py [--write FILE]
"""

import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from launches import count, is_kernel, tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from visible import visible
from write_up import heading, parser, table, write

sys.path.append(str(Path(__file__).parents[1]))  # location of the helpers for several ranks

from processes import FoundBy, meet

from adiv_monitor import Monitor
from adiv_monitor.step import ranks, unsharded
from adiv_monitor.step.merge import merge_ranks, prepared
from adiv_monitor.step.messages import RankContribution, decode, encode

_aten = torch.ops.aten


@dataclass(frozen=True)
class Job:
    """A training of linear layers, as seen by one rank.

    Attributes:
        layers: (inputs, outputs, number of these layers).
        tokens: rows of a layer in a step of this rank.
        rows: `max_rows`.
        processes: number of ranks.
        shards: number of ranks that parameters are sharded over (`fully_shard`); 1: no sharding.
        element: bytes of a parameter.
        due: share of the layers that are measured in one step (`layers_per_step`), as the mean over
            a round.
        looked_up: elements of tables, in which rows are looked up and not multiplied.
    """

    layers: tuple[tuple[int, int, int], ...]
    tokens: int
    rows: int = 128
    processes: int = 1
    shards: int = 1
    element: int = 4
    due: float = 1.0
    looked_up: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of elements in matrix products."""
        return sum(n_layers * (n + 1) * m for n, m, n_layers in self.layers)


@dataclass(frozen=True)
class Cost:
    """The cost of one measured step on one rank, beyond the plain step.

    Attributes:
        flops: of matrix products.
        moved: bytes that operations read and write.
        held: bytes beside the training's own while the optimizer steps.
        gathered: bytes of all-gathered parameters received from other ranks.
        sent: bytes of the contribution to the report, sent to rank 0.
    """

    flops: float
    moved: float
    held: float
    gathered: float
    sent: float


def cost(job: Job) -> Cost:
    """Model the cost with R sampled rows, T tokens passed over, P = nm + m parameters copied."""
    flops = moved = held = gathered = sent = largest = 0.0
    T, N, S, b = job.tokens, job.processes, job.shards, job.element
    R = min(job.rows, T)
    share = job.rows / N
    # A rank sends those of its rows that may be in the sample of all.
    kept = R if N == 1 else min(R, share + 4 * share**0.5)
    for n, m, n_layers in job.layers:
        P, k = (n + 1) * m, n_layers * job.due
        # e and d: two products of the rows with a matrix.
        flops += k * 4 * R * n * m
        # γ: copied 2, its norms 1 and 1 more for its units; θ: copied 2, subtracted 3; w: its norms
        # 1, multiplied by γ 3, summed 1; e and d 2.
        # x: its norms and its sum; G: its norm. Rows: taken, multiplied, and their dot products.
        per_row = (4 * n + 67 * m) * R
        moved += k * b * (13 * P / S + 2 * P + T * (2 * n + m) + per_row)
        # θ before the step, then the update; G, e, z and d. Six more vectors of the layers of one
        # size, of which most are; of a sharded layer the unsharded parameter in float32, twice
        # while it is gathered.
        held += k * (b * P / S + 16 * R * m)
        largest = max(largest, 6 * 4 * k * R * m + (2 * 4 * P if S > 1 else 0))
        gathered += k * 2 * 4 * P * (S - 1) / S  # γ and w, in float32
        # The layer and entries of its scales; the equations; the rows.
        sent += k * (2_540 + 88 * m + 160 * kept) if N > 1 else 0
    # The inputs' sum. The check of one layer's gradient, or of all that are due in turns: G and γ
    # times a vector.
    n, m, n_layers = job.layers[0]
    checked = 1 if job.due == 1 else n_layers * job.due
    flops += 2 * T * n + checked * 2 * m * (T + n)
    tables = job.due * job.looked_up
    moved += 13 * b * tables / S
    held += b * tables / S
    gathered += 2 * 4 * tables * (S - 1) / S
    held += largest
    return Cost(flops, moved, held, gathered, sent)


# --- counts --------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """A mode that counts floating-point operations, bytes moved and bytes held."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken, made = tensors((args, kwargs)), tensors(result)
        before = {tensor.untyped_storage()._cdata for tensor in taken}
        for tensor in made:
            if tensor.untyped_storage()._cdata not in before:  # else it is a view
                self._hold(tensor.untyped_storage())
        if is_kernel(func):
            packet = func.overloadpacket
            if packet in flop_registry:
                self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
            elif packet is _aten.mv:
                self.flops += 2 * args[0].numel()
            if packet is _aten.index_select:  # reads no more than its result
                taken = made
            self.moved += sum(t.numel() * t.element_size() for t in (*taken, *made))
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def release() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, release)


@dataclass(frozen=True)
class Counted:
    """Counts of one step; `held` is the peak while the optimizer steps."""

    flops: int
    moved: int
    held: int
    kernels: int


def counted(job: Job, *, monitored: bool) -> Counted:
    """Count one step in the middle of a run of this job in one process."""
    torch.manual_seed(0)
    linear = [nn.Linear(n, m) for n, m, n_layers in job.layers for _ in range(n_layers)]
    model, x = nn.Sequential(*linear), torch.randn(job.tokens, job.layers[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    due = None if job.due == 1 else round(job.due * len(linear))
    with ExitStack() as attached:
        if monitored:
            options: dict[str, Any] = {"every_n_steps": 1, "max_rows": job.rows}
            monitor = Monitor(model, optimizer, layers_per_step=due, on_error="raise", **options)
            attached.enter_context(monitor)
        work = Work()

        def step() -> int:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            work.peak = work.live
            optimizer.step()
            return work.peak

        for _ in range(3 if due is None else 2 * len(linear) // due):
            step()
        if monitored:
            monitor._controller.read()  # the copies of the step before are gone
        with visible(), work:
            held = step()
        kernels = count(step).kernels
    return Counted(work.flops, work.moved, held, kernels)


SIZES = (
    Job(((512, 512, 4),), tokens=2048, rows=64),
    Job(((512, 512, 4),), tokens=2048, rows=128),
    Job(((512, 512, 4),), tokens=8192, rows=128),
    Job(((1024, 1024, 4),), tokens=1024, rows=128),
    Job(((512, 2048, 1), (2048, 512, 1)), tokens=2048, rows=128),
    Job(((512, 512, 12),), tokens=1024, rows=128, due=1 / 4),
)
_TITLE = ("layers", "tokens", "rows", "layers due")


def _named(job: Job) -> tuple[object, ...]:
    layers = " and ".join(f"{count} × {n}→{m}" for n, m, count in job.layers)
    return layers, f"{job.tokens:,}", job.rows, f"{job.due:.0%}"


def compared(jobs: Sequence[Job]) -> list[list[object]]:
    """Return for each job the model, the count and their ratio, of each quantity."""
    rows: list[list[object]] = []
    for job in jobs:
        plain, measured = (counted(job, monitored=on) for on in (False, True))
        model, row = cost(job), list(_named(job))
        for name, unit in (("flops", 1e9), ("moved", 2**20), ("held", 2**20)):
            extra = getattr(measured, name) - getattr(plain, name)
            expected = getattr(model, name)
            row.append(f"{expected / unit:.2f} / {extra / unit:.2f} = {expected / extra:.2f}")
        layers = sum(n_layers for _, _, n_layers in job.layers) * job.due
        row.append(f"{(measured.kernels - plain.kernels) / layers:.0f}")
        rows.append(row)
    return rows


# --- several ranks -------------------------------------------------------------------------------

WIDTHS, DEPTH, TOKENS = (64, 256, 1024), 2, 512
WORLDS = (2, 8, 64, 1024, 16_384)


@contextmanager
def _noted() -> Iterator[tuple[list[RankContribution], list[int]]]:
    """Record contributions before they are thinned out, and bytes of all-gathered tensors."""
    parts: list[RankContribution] = []
    sizes: list[int] = []

    report = ranks.Ranks.report

    def note_part(self: ranks.Ranks, part: RankContribution, complete: Any) -> Any:
        parts.append(part)
        return report(self, part, complete)

    sharded_as = unsharded.sharded_as

    def note_whole(part: Tensor, alike: Any) -> Any:
        is_sum = any(placement.is_partial() for placement in alike.placements)
        received = alike.numel() - (0 if is_sum else part.numel())
        sizes.append(received * part.element_size())
        return sharded_as(part, alike)

    with (
        patch.object(ranks.Ranks, "report", note_part),
        patch.object(unsharded, "sharded_as", note_whole),
    ):
        yield parts, sizes


def _step_of_one(
    width: int, prepare: Callable[[nn.Module], nn.Module]
) -> tuple[RankContribution, int]:
    torch.manual_seed(0)
    model = prepare(nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)]))
    x = torch.randn(TOKENS, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with _noted() as (parts, sizes):
        monitor = Monitor(model, optimizer, every_n_steps=1, on_error="raise")
        with monitor:
            for _ in range(2):
                sizes.clear()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return parts[-1], sum(sizes)


def _work(rank: int, world: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    meet(rank, world, folder)
    found: dict[int, tuple[RankContribution, int]] = {}
    for width in WIDTHS:
        part, _ = _step_of_one(width, DistributedDataParallel)
        dist.barrier()
        _, gathered = _step_of_one(width, fully_shard)
        dist.barrier()
        found[width] = part, gathered
    torch.save(found, Path(folder) / f"{rank}.pt")


def several() -> tuple[list[list[object]], list[list[object]]]:
    """Return the modelled and counted bytes sent, and rank 0's time to process them."""
    with tempfile.TemporaryDirectory() as folder:
        here = FoundBy(_work, Path(folder))
        found = {world: here[world] for world in (2, 4)}
    rows: list[list[object]] = []
    for width, world in product(WIDTHS, (2, 4)):
        _, gathered = found[world][1][width]
        job = Job(((width, width, DEPTH),), TOKENS, processes=world, shards=world)
        expected = cost(job).gathered
        rows.append([width, world, "all-gathered: parameters", *_ratio(expected, gathered)])
    for width, world in product(WIDTHS, WORLDS):
        sent = len(encode(_thinned(found[2][1][width][0], world)))
        job = Job(((width, width, DEPTH),), TOKENS, processes=world)
        rows.append([width, world, "rank contribution", *_ratio(cost(job).sent, sent)])
    times = []
    for world in (2, 8, 64):
        part = _thinned(found[2][1][1024][0], world)
        data = encode(part)
        times.append([world, DEPTH, f"{1e3 * _seconds(data, world) / world / DEPTH:.2f}"])
    return rows, times


def _thinned(part: RankContribution, world: int) -> RankContribution:
    return replace(part, sums=prepared(part.sums, 128, world, np.random.default_rng(0)))


def _ratio(expected: float, found: float) -> tuple[str, str, str]:
    return f"{expected:,.0f}", f"{found:,.0f}", f"{expected / found:.2f}"


def _seconds(data: bytes, world: int) -> float:
    """Return the seconds to read all contributions and merge them."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        parts = {rank: decode(data) for rank in range(world)}
        merge_ranks(parts, world, 128)
        times.append(time.perf_counter() - began)
    return median(times)


# --- at scale ------------------------------------------------------------------------------------


def transformer(blocks: int, width: int, inner: int, keys: int, words: int) -> Any:
    """Return the linear layers of a Llama-like model: attention, gated MLPs, and the readout.

    Gains of norms are excluded. For the embedding see `Job.looked_up`.
    """
    return (
        (width, width, 2 * blocks),  # queries and output
        (width, keys, 2 * blocks),  # keys and values
        (width, inner, 2 * blocks),
        (inner, width, blocks),
        (width, words, 1),
    )


_7B = transformer(32, 4096, 11_008, 4096, 32_000)
_405B = transformer(126, 16_384, 53_248, 1024, 128_256)
_SMALLER = Job(_7B, 8_192, processes=8, shards=8, looked_up=32_000 * 4096)
_LARGER = Job(_405B, 1_024, processes=16_384, shards=512, looked_up=128_256 * 16_384)
# A block has nine modules with parameters, including norms; then embedding, norm and readout.
LARGE = {
    "7B, 8 ranks, `fully_shard` over 8": _SMALLER,
    "the same, `layers_per_step=16`": replace(_SMALLER, due=16 / (32 * 9 + 3)),
    "405B, 16,384 ranks, `fully_shard` over 512": _LARGER,
    "the same, `layers_per_step=4`": replace(_LARGER, due=4 / (126 * 9 + 3)),
}
LARGE_COLUMNS = (
    *("training", "plain step, PFLOP", "extra, TFLOP", "extra, %"),
    *("moved, GiB", "held, GiB", "all-gathered, GiB", "sent, MiB", "rank 0 receives, GiB"),
)


def at_scale() -> list[list[object]]:
    """Return the model's predictions for trainings larger than any measured here."""
    rows: list[list[object]] = []
    for name, job in LARGE.items():
        job = replace(job, element=4)  # as `fully_shard` stores it
        plain, found = 6.0 * job.tokens * job.parameters, cost(job)
        received = found.sent * (job.processes - 1)
        rows.append(
            [
                *(name, f"{plain / 1e15:.2f}", f"{found.flops / 1e12:.2f}"),
                *(f"{100 * found.flops / plain:.2f}", f"{found.moved / 2**30:.1f}"),
                *(f"{found.held / 2**30:.2f}", f"{found.gathered / 2**30:.1f}"),
                *(f"{found.sent / 2**20:.2f}", f"{received / 2**30:.2f}"),
            ]
        )
    return rows


def main(given: list[str] | None = None) -> None:
    arguments = parser(__doc__).parse_args(given)
    torch.set_num_threads(arguments.threads)
    lines = heading("What a measured step costs, by size", __file__, arguments)
    lines += ["Model / count = ratio; of one measured step, beyond the plain one.", ""]
    jobs = SIZES[:1] if arguments.quick else SIZES
    header = (*_TITLE, "GFLOP", "moved, MiB", "held, MiB", "kernels per layer (count)")
    lines += table(header, compared(jobs))
    if not arguments.quick:
        rows, times = several()
        lines += ["Bytes sent, for each rank and measured step.", ""]
        lines += table(("width", "ranks", "what", "model", "count", "ratio"), rows)
        lines += ["How long rank 0 takes to read and merge all contributions.", ""]
        lines += table(("ranks", "layers", "ms per layer and rank"), times)
    lines += [
        "The model at scale, for each rank and measured step. Nothing here is measured.",
        "",
    ]
    lines += table(LARGE_COLUMNS, at_scale())
    print(write(lines, arguments.write))


if __name__ == "__main__":
    main()
