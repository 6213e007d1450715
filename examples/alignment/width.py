"""The coordinate check: how a model's activations and their moves scale with width.

    python examples/alignment/width.py my_module:build --widths 64 256 1024 --plot widths.png
    python examples/alignment/width.py --runs 64=small.jsonl 256=large.jsonl

`build(width, seed)` returns an `Experiment`. Runs are `JsonlSink` files of a monitor with
`alignment=Probe(...)`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from logits import read_logits
from torch import nn
from width_plot import plot_widths
from width_slopes import RATIOS, LayerWidths, Run, Slope, layer_widths

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.printable import printable


@dataclass(frozen=True, eq=False)
class Experiment:
    """A model and its training step, with any parametrization and any optimizer.

    Attributes:
        model: the model.
        step: takes one training step.
        probe: the probe; use the same samples at each width.
    """

    model: nn.Module
    step: Callable[[], object]
    probe: Probe


Build = Callable[[int, int], Experiment]


def measure_widths(
    build: Build, widths: Sequence[int], *, steps: int = 10, seeds: int = 3
) -> list[Run]:
    """Train at each width and seed for some steps, and read all layers and logits after each.

    Args:
        build: (width, seed) → an experiment.
        widths: at least two different widths.
        steps: number of steps, at least one.
        seeds: runs per width, with seeds from 0 on; at least one.

    Raises:
        ValueError: there are fewer widths, steps or seeds.
    """
    if wrong := _wrong(widths, steps, seeds):
        raise ValueError(f"measure_widths: {wrong}")
    runs = []
    for width in widths:
        for seed in range(seeds):
            experiment = build(width, seed)
            model, probe = experiment.model, experiment.probe
            alignment, before = Alignment(model, probe), read_logits(model, probe)
            readings = {}
            for step in range(1, steps + 1):
                experiment.step()
                readings[step] = {p: r.to_dict() for p, r in alignment.read().items()}
                logits = read_logits(model, probe)
                readings[step] |= {p: x.record(before[p]) for p, x in logits.items()}
            runs.append(Run(width, readings))
    return runs


def _wrong(widths: Sequence[int], steps: int, seeds: int) -> str:
    """Return why there would be nothing to compare, or ""."""
    if len(set(widths)) < 2:
        return f"got widths {list(widths)}, expected two different ones at least"
    few = [f"{name} {n}" for name, n in (("steps", steps), ("seeds", seeds)) if n < 1]
    return f"got {' and '.join(few)}, expected at least 1" if few else ""


def runs_of(files: Iterable[tuple[int, Path]]) -> list[Run]:
    """Load runs from files of a `JsonlSink`, one line per report.

    Raises:
        ValueError: a file has no alignment readings.
    """
    runs = []
    for width, file in files:
        reports = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        readings = {r["step"]: r["alignment"] for r in reports if r.get("alignment")}
        if not readings:
            raise ValueError(
                f"{file}: holds no alignments, expected a file of a monitor with alignment=Probe(…)"
            )
        runs.append(Run(width, readings))
    return runs


def described(layers: Sequence[LayerWidths]) -> str:
    """Format the report as text: slopes with 95 % intervals, κ, and a verdict per layer."""
    paths = [printable(layer.path) for layer in layers]
    name = max(len("layer"), *map(len, paths))
    lines = [
        f"after step {layers[0].step}; slopes against width ± half of their 95 % interval",
        f"{'layer':{name}}  {'verdict':8}  {'move':>13}  {'size':>13}  exponent ± (κ)",
    ]
    for layer, path in zip(layers, paths, strict=True):
        known = [
            f"{ratio} {_slope(layer.exponents[ratio]).strip()} (κ {layer.kappas[ratio]:.2f})"
            for ratio in RATIOS
            if ratio in layer.exponents
        ]
        known += [layer.note] if layer.note else []
        lines.append(
            f"{path:{name}}  {layer.verdict:8}  {_slope(layer.move):>13}  "
            f"{_slope(layer.size):>13}  {', '.join(known)}".rstrip()
        )
    return "\n".join(lines)


def _slope(slope: Slope | None) -> str:
    return "–" if slope is None else f"{slope.value:+.2f} ± {slope.half:.2f}"


def _found(name: str) -> Build:
    module, colon, function = name.partition(":")
    if not colon:
        raise SystemExit(f"width: got {name!r}, expected module:function")
    sys.path.insert(0, "")
    build: Build = getattr(import_module(module), function)
    return build


def _file(given: str) -> tuple[int, Path]:
    width, _, file = given.partition("=")
    return int(width), Path(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python examples/alignment/width.py")
    parser.add_argument("build", nargs="?", help="module:function of (width, seed)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=_file, nargs="+", default=[], help="WIDTH=FILE.jsonl")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    if bool(given.build) == bool(given.runs):
        parser.error("expected either module:function or --runs")
    if given.build and (wrong := _wrong(given.widths, given.steps, given.seeds)):
        parser.error(wrong)
    if given.runs:
        runs = runs_of(given.runs)
    else:
        runs = measure_widths(
            _found(given.build), given.widths, steps=given.steps, seeds=given.seeds
        )
    layers = layer_widths(runs)
    print(described(layers))
    if given.plot is not None:
        plot_widths(layers, given.plot, given.build or "")


if __name__ == "__main__":
    main()
