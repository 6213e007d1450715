"""The cost of the corrected layers: forward and backward against torch's own layers, as one table.

It runs on a CPU; gpu.py compares the same layers on a GPU.

All candidates of a contest take turns within every round, so that a busy machine slows them alike;
a ratio is the median over rounds of the two times within a round, with its quartiles.

    python tests/benchmarks/layers.py [--quick] [--write FILE]
"""

import argparse
import math
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from layer_contests import CPU, Contest
from timing import copies, in_a_graph, take_turns
from torch import Tensor, nn

EXPECTED = """\
Expected before measuring, by counting memory passes (x, y: bytes of input and output; a plain
layer's matrix products set the floor). One thread, eager: 1.10-1.20 x nn.Linear for
(512, 3072, 512), where four passes over a wide x weigh most, 1.05-1.15 for (2048, 768, 3072);
compiled 1.05-1.15 for both. Gradient-only 1.03-1.10; its batch form more, it adds a solve.
PatchNorm 1.3-2.0 x nn.Conv2d, about conv + BatchNorm. Corrected attention 1.1-1.3, the MLP 1.3-2 (a
dozen small operations more).
Goals: eager <= 1.20 and compiled <= 1.10 x nn.Linear, not slower than LayerNorm + Linear or
RMSNorm + Linear in the same mode.
"""
HEADER = ("case", "layer", "mode", "µs", "x floor", "x 1st peer", "x 2nd peer", "peak MiB")


def training_step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a training step of forward and backward, which makes fresh gradients every time."""
    upstream = torch.randn_like(module(x))
    leaves = [x, *module.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        module(x).backward(upstream)

    return step


def in_mode(mode: str, make: Callable[[], nn.Module], data: Contest) -> Callable[[], object]:
    """Return the step in a mode, ready to be timed; a graph has several, each on its own data."""
    steps = []
    for _ in range(sets_of(data) if mode == "graph" else 1):
        torch.manual_seed(0)
        module = make().to(data.device, data.dtype)
        x = torch.randn(data.shape, device=data.device, dtype=data.dtype, requires_grad=True)
        if mode == "compiled":
            module = torch.compile(module, backend=data.backend)
        steps.append(training_step(module, x))
    if mode == "graph":
        return in_a_graph(steps)
    for _ in range(2):
        steps[0]()
    return steps[0]


def sets_of(contest: Contest) -> int:
    """Return the number of a graph's data sets, from the sizes of the input and the plain layer."""
    plain = next(iter(contest.layers.values()))()
    numbers = math.prod(contest.shape) + sum(p.numel() for p in plain.parameters())
    return copies(numbers * contest.dtype.itemsize)


def ratio(times: list[float], reference: list[float]) -> str:
    ratios = [one / other for one, other in zip(times, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def peak_memory(step: Callable[[], object], device: str) -> str:
    if device == "cpu":
        return "–"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def run(contest: Contest, modes: Sequence[str], rounds: int | None) -> list[tuple[str, ...]]:
    """Return the table rows of one contest; the baseline is the first layer in the first mode."""
    if "compiled" in modes:
        torch.compiler.reset()
    title = f"{contest.title}, {contest.device} {str(contest.dtype).removeprefix('torch.')}"
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    rows: list[tuple[str, ...]] = []
    for mode in modes:
        for name, make in contest.layers.items():
            try:
                steps[mode, name] = in_mode(mode, make, contest)
            except Exception as cause:  # a peer that cannot run must not end the contest
                print(f"{title}: {name}, {mode}: {cause!r}", file=sys.stderr)
                missing = f"not measured: {type(cause).__name__}"
                rows.append((title, name, mode, missing, *["–"] * 4))
    sets = sets_of(contest) if "graph" in modes else 1
    times = take_turns(steps, rounds or contest.rounds, contest.device, max(1, 20 // sets))
    floor, *peers = list(contest.layers)[:3]
    plain = modes[0], floor
    if plain not in times:
        raise RuntimeError(f"{contest.title}: {floor} does not run in mode {modes[0]}.")
    for (mode, name), own in times.items():
        against = [times.get((mode, peer)) for peer in peers]
        ratios = [
            "–" if other is None or other is own else ratio(own, other)
            for other in (times[plain], *against)
        ]
        taken = f"{1e6 * statistics.median(own) / (sets if mode == 'graph' else 1):.1f}"
        memory = peak_memory(steps[mode, name], contest.device) if mode != "graph" else "–"
        rows.append((title, name, mode, taken, *ratios, memory))
    return rows


def line_of(row: tuple[str, ...]) -> str:
    return "| " + " | ".join(row) + " |"


def hardware() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"CPU {model}, {torch.get_num_threads()} thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rounds: a check only")
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
    for contest in CPU:
        for row in run(contest, ("eager", "compiled"), 3 if arguments.quick else None):
            lines.append(line_of(row))
            print(lines[-1], flush=True)  # kept if time runs out
    if arguments.write:
        arguments.write.write_text("\n".join([head, *lines]) + "\n")


if __name__ == "__main__":
    main()
