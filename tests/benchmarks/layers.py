"""What the corrected layers cost: forward and backward against torch's own layers, as one table.

All candidates of a contest take turns within every round, so that a busy machine slows them alike;
a ratio is the median over rounds of the two times within a round, with its quartiles.

    python tests/benchmarks/layers.py [--quick] [--write FILE]
"""

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from adiv_layers.ops import unit_rows
from layer_contests import CPU, CUDA, Contest
from torch import Tensor, nn

EXPECTED = """\
Expected before measuring, by counting memory passes (x, y: bytes of input and output; a plain
layer's matrix products set the floor). CPU, one thread, eager: 1.10-1.20 x nn.Linear for
(512, 3072, 512), where four passes over a wide x weigh most, 1.05-1.15 for (2048, 768, 3072);
compiled 1.05-1.15 for both. Gradient-only 1.03-1.10; its batch form more, it adds a solve.
PatchNorm 1.3-2.0 x nn.Conv2d on the CPU, about conv + BatchNorm. Corrected attention 1.1-1.3, the
MLP 1.3-2 (a dozen small operations more). CUDA, bf16: 1.07, 1.07 and 1.10 x
nn.Linear for the three shapes, RMSNorm + Linear the same or more; PatchNorm 1.2-1.4 x nn.Conv2d;
gradient-only 1.03-1.04; row kernels at 80-85 % of the bandwidth of a copy.
Goals: CPU eager <= 1.20 and compiled <= 1.10 x nn.Linear, not slower than LayerNorm + Linear or
RMSNorm + Linear in the same mode.
"""
HEADER = ("case", "layer", "mode", "x floor", "x 1st peer", "x 2nd peer", "peak MiB")


def training_step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward as in training: the gradients are fresh every time."""
    upstream = torch.randn_like(module(x))
    leaves = [x, *module.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        module(x).backward(upstream)

    return step


def in_mode(mode: str, module: nn.Module, x: Tensor) -> Callable[[], None]:
    """The step, ready to be timed."""
    step = training_step(torch.compile(module) if mode == "compiled" else module, x)
    if mode != "graph":
        for _ in range(2):
            step()
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step: Callable[[], None], device: str) -> float:
    """Time of one step; on CUDA of twenty, between two events."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 20e3


def take_turns(
    steps: dict[tuple[str, str], Callable[[], None]], rounds: int, device: str
) -> dict[tuple[str, str], list[float]]:
    """Times of every step, one per round; the order rotates."""
    names = list(steps)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(steps[name], device))
    return times


def ratio(times: list[float], reference: list[float]) -> str:
    ratios = [one / other for one, other in zip(times, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def peak_memory(step: Callable[[], None], device: str) -> str:
    if device == "cpu":
        return "–"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def run(contest: Contest, rounds: int | None) -> list[tuple[str, ...]]:
    """Table rows of one contest; the floor is always the first layer in the first mode."""
    if contest.device == "cuda" and not torch.cuda.is_available():
        return [(contest.title + ", CUDA", "all", ", ".join(contest.modes), *["not measured"] * 4)]
    torch.compiler.reset()
    x = torch.randn(contest.shape, device=contest.device, dtype=contest.dtype, requires_grad=True)
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    for mode in contest.modes:
        for name, make in contest.layers.items():
            torch.manual_seed(0)
            module = make().to(contest.device, contest.dtype)
            try:
                steps[mode, name] = in_mode(mode, module, x)
            except Exception as error:  # one peer that cannot run must not end the others' contest
                print(f"{contest.title}: {name}, {mode}: {error}", file=sys.stderr)
    times = take_turns(steps, rounds or contest.rounds, contest.device)
    floor, *peers = list(contest.layers)[:3]
    title = f"{contest.title}, {contest.device} {str(contest.dtype).removeprefix('torch.')}"
    rows = []
    for (mode, name), own in times.items():
        against = [times.get((mode, peer)) for peer in peers]
        ratios = [
            "–" if other is None or other is own else ratio(own, other)
            for other in (times[contest.modes[0], floor], *against)
        ]
        memory = peak_memory(steps[mode, name], contest.device) if mode != "graph" else "–"
        rows.append((title, name, mode, *ratios, memory))
    return rows


def bandwidth_rows() -> list[tuple[str, ...]]:
    """How fast the row kernels move memory, as a share of a plain copy's rate."""
    title = "row kernels, 16384×4096 bf16, CUDA: share of a copy's bandwidth"
    if not torch.cuda.is_available():
        return [(title, "all", "eager", *["not measured"] * 4)]
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target, u = torch.empty_like(x), torch.randn_like(x)
    unit, _ = unit_rows(x, 1.0)

    def backward() -> None:
        torch.autograd.grad(unit, x, u, retain_graph=True)

    moved = {"copy": 2, "unit_rows forward": 2, "unit_rows backward": 3}  # passes over x
    steps = {
        ("eager", "copy"): lambda: target.copy_(x.detach()),
        ("eager", "unit_rows forward"): lambda: unit_rows(x.detach(), 1.0),
        ("eager", "unit_rows backward"): backward,
    }
    for step in steps.values():
        step()
    times = take_turns(steps, 15, "cuda")
    rates = {name: [moved[name] / t for t in own] for (_, name), own in times.items()}
    return [(title, n, "eager", ratio(rates[n], rates["copy"]), "–", "–", "–") for n in rates]


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def hardware() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"CPU {model}, {torch.get_num_threads()} thread; GPU {gpu}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds: a check only")
    parser.add_argument("--write", type=Path, help="write the report to this file as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if arguments.quick else None
    rows = [row for contest in CPU + CUDA for row in run(contest, rounds)] + bandwidth_rows()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    report = (
        "# Cost of the corrected layers\n\n"
        "Forward + backward, median ratio [quartiles]. Floor: the first layer of a case, in its\n"
        "first mode. Peers: the second and third, in the same mode. Where the floor's layer has a\n"
        "compiled row, that is the same computation again: how far it is from 1 is the noise.\n\n"
        f"{EXPECTED}\nCommand: `python {shlex.join(sys.argv)}`; {versions}; {hardware()}.\n\n"
        f"{table(rows)}\n"
    )
    print(report)
    if arguments.write:
        arguments.write.write_text(report)


if __name__ == "__main__":
    main()
