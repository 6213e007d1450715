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
from dataclasses import replace
from pathlib import Path

import torch
from layer_contests import CPU, CUDA, Contest
from torch import Tensor, nn

EXPECTED = """\
Expected before measuring, by counting memory passes (x, y: bytes of input and output; a plain
layer's matrix products set the floor). CPU, one thread, eager: 1.10-1.20 x nn.Linear for
(512, 3072, 512), where four passes over a wide x weigh most, 1.05-1.15 for (2048, 768, 3072);
compiled 1.05-1.15 for both. Gradient-only 1.03-1.10; its batch form more, it adds a solve.
PatchNorm 1.3-2.0 x nn.Conv2d on the CPU, about conv + BatchNorm. Corrected attention 1.1-1.3, the
MLP 1.3-2 (a dozen small operations more). CUDA, bf16, at 790 TFLOP/s and 4.3 TB/s, nothing
overlapping (expected.py counts the bytes, gpu.py takes the rates that it measures): norm-like 1.07,
1.07, 1.09 x nn.Linear for the three shapes, affine-like 1.09, 1.10, 1.12, its bias being one more
column of the product (a pass of its own: 1.10, 1.18, 1.24); RMSNorm + Linear the same as norm-like
or more. Below that only what the 50 MB of L2 keep between two kernels can bring it: the goals of
1.06, 1.06, 1.10 are 0.01 under norm-like's bytes and 0.02 to 0.04 under affine-like's. PatchNorm
1.2-1.4 x nn.Conv2d; gradient-only 1.03-1.04. The small MLP: 7 kernels against 12, so <= 1.0.
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
    plain = contest.modes[0], floor
    if plain not in times:
        raise SystemExit(f"{contest.title}: {floor} does not run in mode {contest.modes[0]}.")
    title = f"{contest.title}, {contest.device} {str(contest.dtype).removeprefix('torch.')}"
    rows = []
    for (mode, name), own in times.items():
        against = [times.get((mode, peer)) for peer in peers]
        ratios = [
            "–" if other is None or other is own else ratio(own, other)
            for other in (times[plain], *against)
        ]
        memory = peak_memory(steps[mode, name], contest.device) if mode != "graph" else "–"
        rows.append((title, name, mode, *ratios, memory))
    return rows


def line_of(row: tuple[str, ...]) -> str:
    return "| " + " | ".join(row) + " |"


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
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one's contests")
    parser.add_argument("--modes", help="only these, as in eager,compiled,graph")
    parser.add_argument("--write", type=Path, help="write the report to this file as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    head = (
        "# Cost of the corrected layers\n\n"
        "Forward + backward, median ratio [quartiles]. Floor: the first layer of a case, in its\n"
        "first mode. Peers: the second and third, in the same mode. Where the floor's layer has a\n"
        "compiled row, that is the same computation again: how far it is from 1 is the noise.\n\n"
        f"{EXPECTED}\nCommand: `python {shlex.join(sys.argv)}`; {versions}; {hardware()}.\n"
    )
    lines = [line_of(HEADER), line_of(("---",) * len(HEADER))]
    print(head, *lines, sep="\n", flush=True)
    for contest in CPU + CUDA:
        if arguments.device in (None, contest.device):
            asked = arguments.modes.split(",") if arguments.modes else contest.modes
            modes = tuple(mode for mode in contest.modes if mode in asked)
            for row in run(replace(contest, modes=modes), 3 if arguments.quick else None):
                lines.append(line_of(row))
                print(lines[-1], flush=True)  # so that whoever runs out of time has these
    if arguments.write:
        arguments.write.write_text("\n".join([head, *lines]) + "\n")


if __name__ == "__main__":
    main()
