"""Figs 2 to 5 as text and pictures, from runs of several widths and depths."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from figures import COLOURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from slopes import Run, at_the_end, mean_and_error
from table import markdown, plus

ACTIVATION = {2: "tanh", 3: "leaky", 5: "none"}
PANELS = ((2, "tanh"), (3, "leaky"), (4, "tanh"), (4, "leaky"), (5, "none"))
DEPTHS = (1, 3)  # hidden layers in Figs 2, 3 and 5
Point = tuple[int, int]  # hidden layers, width


def text(runs: Sequence[Run], depth: int) -> str:
    """Accuracies of all widths and depths, in Markdown.

    Args:
        runs: as in widths.json.
        depth: hidden layers in Fig 4.
    """
    epochs = " or ".join(map(str, sorted({run["epoch"][-1] for run in runs})))
    seeds = len({run["seed"] for run in runs})
    parts = [
        f"Data: {runs[0]['data']}; pixels: {runs[0]['pixels']}; batch size: "
        f"{runs[0]['batch_size']}; epochs: {epochs}; seeds: {seeds}. Test accuracy in percent, "
        "mean of the last tenth of the epochs ± standard error over seeds."
    ]
    for figure, activation in PANELS:
        depths = DEPTHS if figure in ACTIVATION else (depth,)
        found = accuracies(run for run in runs if run["activation"] == activation)
        found = {
            method: {point: values for point, values in points.items() if point[0] in depths}
            for method, points in found.items()
        }
        if any(found.values()):
            parts.append(f"## Fig {figure}: {activation}")
            parts.append(_table(found))
    return "\n\n".join(parts) + "\n"


def accuracies(runs: Iterable[Run]) -> dict[str, dict[Point, list[float]]]:
    """By method, and by hidden layers and width: accuracies of all seeds."""
    found: dict[str, dict[Point, list[float]]] = {}
    for run in runs:
        points = found.setdefault(run["method"], {})
        points.setdefault((run["depth"], run["width"]), []).append(at_the_end(run))
    return found


def _table(found: dict[str, dict[Point, list[float]]]) -> str:
    points = sorted({point for of_method in found.values() for point in of_method})
    head = ["map", *(f"{depth} × {width}" for depth, width in points)]
    rows = []
    for method, values in found.items():
        cells = [plus(*mean_and_error(values[p])) if p in values else "" for p in points]
        rows.append([method, *cells])
    return markdown(head, rows)


def curves(runs: Sequence[Run], figure: int, file: Path) -> None:
    """Figs 2, 3 and 5: accuracy by epoch, a row of panels per depth, a column per width."""
    mine = [r for r in runs if r["activation"] == ACTIVATION[figure] and r["depth"] in DEPTHS]
    widths = sorted({run["width"] for run in mine})
    picture = Figure(figsize=(3.4 * len(widths) + 2, 3.2 * len(DEPTHS)), layout="constrained")
    grid = picture.subplots(len(DEPTHS), len(widths), squeeze=False, sharex=True, sharey=True)
    for depth, row in zip(DEPTHS, grid, strict=True):
        for width, axes in zip(widths, row, strict=True):
            here = [run for run in mine if (run["depth"], run["width"]) == (depth, width)]
            _panel(axes, here)
            axes.set(title=f"{depth} hidden, {width} wide")
    _finish(picture, grid[0][0], f"Fig {figure}: {ACTIVATION[figure]}; {runs[0]['data']}", file)


def _panel(axes: Axes, runs: Sequence[Run]) -> None:
    for method in dict.fromkeys(run["method"] for run in runs):
        of_method = [run for run in runs if run["method"] == method]
        shortest = min(len(run["epoch"]) for run in of_method)
        by_epoch = [
            mean_and_error([run["test_accuracy"][i] for run in of_method]) for i in range(shortest)
        ]
        epochs = of_method[0]["epoch"][:shortest]
        marker = "o" if shortest == 1 else ""
        means = [mean for mean, _ in by_epoch]
        axes.plot(epochs, means, marker=marker, color=COLOURS[method], lw=1, label=method)
        if not any(math.isnan(error) for _, error in by_epoch):
            low, high = ([m + sign * e for m, e in by_epoch] for sign in (-1, 1))
            axes.fill_between(epochs, low, high, color=COLOURS[method], alpha=0.2, lw=0)
    axes.set(xlabel="epoch", ylabel="test accuracy, percent")


def sweep(runs: Sequence[Run], depth: int, file: Path) -> None:
    """Fig 4: accuracy against width, a panel per activation."""
    picture = Figure(figsize=(11, 4), layout="constrained")
    grid = picture.subplots(1, 2, squeeze=False, sharey=True)
    for activation, axes in zip(("tanh", "leaky"), grid[0], strict=True):
        mine = [r for r in runs if (r["activation"], r["depth"]) == (activation, depth)]
        for method, points in accuracies(mine).items():
            widths = sorted(width for _, width in points)
            found = [mean_and_error(points[depth, width]) for width in widths]
            means, errors = zip(*found, strict=True)
            style = {"marker": "o", "ms": 4, "lw": 1, "capsize": 3}
            axes.errorbar(widths, means, errors, color=COLOURS[method], label=method, **style)
        axes.set(xlabel="width", ylabel="test accuracy, percent", title=activation)
        axes.set_xscale("log", base=2)
    _finish(picture, grid[0][0], f"Fig 4: {depth} hidden layers; {runs[0]['data']}", file)


def _finish(picture: Figure, labelled: Axes, title: str, file: Path) -> None:
    handles, labels = labelled.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right upper", title="map")
    picture.suptitle(title, fontsize=8)
    picture.savefig(file, dpi=110)
