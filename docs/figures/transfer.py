"""The picture of docs/learning-rates.md: loss over learning rate, at several widths.

Drawn of the runs in tests/benchmarks/results/transfer.jsonl, which `tests/benchmarks/transfer.py`
makes in about half an hour on a core; this is done in seconds.

    python docs/figures/transfer.py [--steps 60] [--out docs/images]
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent.parent
RUNS = ROOT / "tests" / "benchmarks" / "results" / "transfer.jsonl"
ROWS = {
    ("mlp", "adam"): "MLP, Adam",
    ("mlp", "sgd"): "MLP, SGD",
    ("gpt", "adam"): "GPT, Adam",
    ("gpt", "sgd"): "GPT, SGD",
}
FACTORS = {
    ("mlp", "adam"): "input=-10,readout=10,vector=-10",
    ("mlp", "sgd"): "input=-10,readout=10,vector=-10",
    ("gpt", "adam"): "input=10,readout=5",
    ("gpt", "sgd"): "input=10",
}
COLUMNS = {
    "torch": "torch's own",
    "mup": "muP",
    "mup:": "muP, factors by kind",
    "measured:": "the solver's learning rates,\nfactors by kind",
    "package": "the mup package",
}
Curves = dict[int, dict[float, list[float]]]  # width → rate → loss of each seed


def read() -> dict[tuple[str, str, str], Curves]:
    """By model, optimizer and arm."""
    found: dict[tuple[str, str, str], Curves] = defaultdict(lambda: defaultdict(dict))
    for line in RUNS.read_text().splitlines():
        run = json.loads(line)
        *key, width = run["setting"]
        rate = 10 ** (run["tenfold"] / 10)
        found[tuple(key)][width].setdefault(rate, []).append(float(run["loss"]))
    return found


def draw(axes: Axes, curves: Curves) -> list[float]:
    """A line for each width, a dot for each run, the best rate marked. Returns the means."""
    shown: list[float] = []
    for place, (width, curve) in enumerate(sorted(curves.items())):
        colour = colormaps["viridis_r"](0.15 + 0.25 * place)
        rates = [rate for rate in sorted(curve) if math.isfinite(mean(curve[rate]))]
        means = [mean(curve[rate]) for rate in rates]
        for rate in rates:
            axes.plot([rate] * len(curve[rate]), curve[rate], ".", ms=2.5, color=colour)
        axes.plot(rates, means, color=colour, lw=1.3, label=f"{width} wide")
        axes.plot(rates[means.index(min(means))], min(means), "o", ms=6, color=colour)
        shown += means
    return shown


def transfer() -> Figure:
    """A row for each model and optimizer, a column for each arm."""
    found = read()
    figure = Figure(figsize=(12, 9.5), layout="constrained")
    grid = figure.subplots(len(ROWS), len(COLUMNS), sharey="row", sharex="row")
    for (row, title), line in zip(ROWS.items(), grid, strict=True):
        means = []
        for arm, axes in zip(COLUMNS, line, strict=True):
            factors = FACTORS[row] if arm.endswith(":") else ""
            means += draw(axes, found[row[0], row[1], arm + factors])
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3)
        least = min(means)
        line[0].set_ylim(0.93 * least, (8 if row[0] == "mlp" else 1.45) * least)
        line[0].set_ylabel(f"{title}\nloss")
        place = (1, "lower left") if row[0] == "mlp" else (0, "upper right")  # over no line
        line[place[0]].legend(fontsize=7, loc=place[1])
        if row[0] == "gpt":
            line[0].set_yticks(
                [2.4, 2.6, 2.8, 3.0, 3.2, 3.4], ["2.4", "2.6", "2.8", "3", "3.2", "3.4"]
            )
            line[0].set_yticks([], minor=True)
    for title, axes in zip(COLUMNS.values(), grid[0], strict=True):
        axes.set_title(title, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("learning rate η")
    return figure


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--steps", type=int, default=60, help="of no effect: nothing is trained")
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "images")
    chosen = options.parse_args()
    path = chosen.out / "transfer.png"
    transfer().savefig(path, dpi=100)
    print(path)


if __name__ == "__main__":
    main()
