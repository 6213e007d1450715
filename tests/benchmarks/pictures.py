"""The cost of a running training's pictures and pages: within the loop, and at its end.

A small network is trained for a few seconds, every tenth step measured, once for each sink in a
process of its own, so that all imports for pictures count. TensorBoard's package is imported
before. Then findings and pictures alone are timed, for increasing numbers of layers at a hundred
steps.

Goal: at most 5 % of the run. Expected before it was measured: nothing within a loop of less than 12
seconds (60 for the page), 5 % of longer ones, the end included; at the end 0.2 s for pictures, 1.2
s for the page, whose libraries take most of it; of 300 layers 0.6 s.

    python tests/benchmarks/pictures.py [--steps N …] [--rounds N] [--write FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from write_up import heading, parser, table, write

sys.path.append(str(Path(__file__).parents[1]))  # location of the example reports

from example_reports import reading, report

from adiv_monitor import Monitor
from adiv_monitor.diagnosis.running import MOST_REPORTS, Running
from adiv_monitor.sinks import HtmlSink, MemorySink, TensorBoardSink
from adiv_monitor.sinks import board as board_module
from adiv_monitor.sinks.board import pictures

SINKS = {
    "none": "no sink",
    "texts": "`TensorBoardSink` without pictures",
    "pictures": "`TensorBoardSink`",
    "page": "`HtmlSink`",
}


def sink_of(kind: str, folder: Path) -> Any:
    if kind == "none":
        return MemorySink()
    if kind == "page":
        return HtmlSink(folder / "page.html")
    if kind == "texts":  # the sink's behaviour without matplotlib
        board_module.find_spec = lambda name: None  # type: ignore[assignment]
    return TensorBoardSink(folder)


def trained(kind: str, steps: int) -> dict[str, float]:
    """Return the seconds of the loop, of its pictures or page, and of the end."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = torch.randn(128, 64), torch.randint(10, (128,))
    with tempfile.TemporaryDirectory() as folder:
        sink = sink_of(kind, Path(folder))
        began = time.perf_counter()
        with Monitor(model, optimizer, every_n_steps=10, sinks=[sink]):
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            loop = time.perf_counter() - began
            spent = getattr(sink, "spent", 0.0)
        sink.close()
        return {"loop": loop, "spent": spent, "end": time.perf_counter() - began - loop}


def in_a_process(kind: str, steps: int, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--threads", str(threads)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def rows_of(steps: int, rounds: int, threads: int) -> list[list[str]]:
    """Return the medians over the rounds for each sink; sinks take turns."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in SINKS}
    for _ in range(rounds):
        for kind, runs in found.items():
            runs.append(in_a_process(kind, steps, threads))
    rows = []
    for kind, runs in found.items():
        loop, spent, end = (median(run[part] for run in runs) for part in ("loop", "spent", "end"))
        share = median((run["spent"] + run["end"]) / (run["loop"] + run["end"]) for run in runs)
        rows.append(
            [
                *(f"MLP, {steps:,} steps", SINKS[kind]),
                *(f"{seconds:.2f}" for seconds in (loop, spent, end)),
                f"{share:.1%}",
            ]
        )
    return rows


def drawn(layers: int, reports: int) -> list[str]:
    """Return the seconds for findings and for pictures of this many layers, after all imports."""
    running = Running()
    draws = [reading(i) for i in range(layers)]
    of_all = {f"blocks.{i // 6}.part{i % 6}": draw for i, draw in enumerate(draws)}
    for step in range(reports):
        running.add(replace(report(layers=of_all), step=step))
    pictures(running.record(), running.findings())
    began = time.perf_counter()
    findings = running.findings()
    found = time.perf_counter()
    shown = pictures(running.record(), findings)
    end = time.perf_counter()
    size = sum(map(len, shown.values()))
    times = [f"{found - began:.3f}", f"{end - found:.2f}"]
    return [str(layers), str(reports), *times, str(len(shown)), f"{size / 1e3:.0f}"]


def main(given: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, nargs="+", default=[1000, 5000])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--child", choices=SINKS, help=argparse.SUPPRESS)
    chosen = options.parse_args(given)
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        import_module("torch.utils.tensorboard")
        print(json.dumps(trained(chosen.child, chosen.steps[0])))
        return
    steps, rounds = ([20], 1) if chosen.quick else (chosen.steps, chosen.rounds)
    runs = [row for count in steps for row in rows_of(count, rounds, chosen.threads)]
    head = ["run", "sink", "loop, s", "of it pictures or page, s", "after it, s", "share of all"]
    sizes = [drawn(count, 2 if chosen.quick else MOST_REPORTS) for count in (3, 40, 300)]
    columns = ["layers", "reports", "findings, s", "pictures, s", "pictures", "kB"]
    print(
        write(
            [
                *heading("What pictures of a training cost", __file__, chosen),
                "A step in ten measured; medians. *After it*: what `close()` waits for, imports",
                "included. *Share*: pictures or page, and what is after the loop, of the whole.",
                "",
                *table(head, runs),
                "",
                "All findings and pictures of a training, once everything is imported:",
                "",
                *table(columns, sizes),
            ],
            chosen.write,
        )
    )


if __name__ == "__main__":
    main()
