"""What was read while networks trained, beside their accuracy: tables, correlations, pictures."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import COLOURS
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from slopes import Run, at_the_end
from table import markdown

# Measures of the monitor, and the sign that the theory gives their correlation with accuracy.
STATED = {
    "scale_cv": -1,
    "gradient_cosine": 1,
    "update_cosine": 1,
    "interference_ratio": -1,
    "harmed_fraction": -1,
    "common_share": -1,
}
RATE = "effective_lr"
MEASURES = (*STATED, RATE)
LEVEL = 0.95  # of the intervals
# Readings that are alike in so many digits behind the point are ties: scales that a map makes equal
# differ by rounding.
DIGITS = 3
Array = NDArray[np.float64]


class Correlation(NamedTuple):
    """A rank correlation with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return ""
        shown = f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"
        return shown.replace("-", "−")


def layer_medians(run: Run, measure: str) -> list[float]:
    """A measure of one network: medians over training by layer, of the layers that have any."""
    known = [[value for value in layer if value is not None] for layer in run[measure]]
    return [statistics.median(layer) for layer in known if layer]


def typical(run: Run, measure: str) -> float:
    """A measure of one network: mean over layers of the median over training."""
    medians = layer_medians(run, measure)
    return statistics.fmean(medians) if medians else math.nan


def correlation(x: Sequence[float], y: Sequence[float], given: Sequence[float] = ()) -> Correlation:
    """Spearman's rank correlation of x and y, with an interval.

    The interval is Fisher's, with the variance (1 + r²/2)/(n − 3) of Bonett and Wright (2000).

    Args:
        x: values.
        y: as many.
        given: as many again: the correlation is partial, of what a line through the ranks of
            these leaves of the ranks of x and y.
    """
    columns = [x, y, *([given] if len(given) else [])]
    whole = [row for row in zip(*columns, strict=True) if all(map(math.isfinite, row))]
    free = len(whole) - 3 - (len(columns) - 2)
    if free < 1:
        return Correlation(math.nan, math.nan, math.nan)
    ranks = [stats.rankdata(column) for column in zip(*whole, strict=True)]
    ranks = [rank - rank.mean() for rank in ranks]
    if len(given):
        ranks = [_less(rank, ranks[2]) for rank in ranks[:2]]
    length = math.sqrt(float(ranks[0] @ ranks[0]) * float(ranks[1] @ ranks[1]))
    if length < 1e-9:
        return Correlation(math.nan, math.nan, math.nan)
    r = min(max(float(ranks[0] @ ranks[1]) / length, -1.0), 1.0)
    if abs(r) > 1 - 1e-12:
        return Correlation(r, r, r)
    reach = stats.norm.ppf((1 + LEVEL) / 2) * math.sqrt((1 + r * r / 2) / free)
    return Correlation(r, math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach))


def _less(values: Array, line: Array) -> Array:
    """What is left of centred values behind a line through the origin."""
    square = float(line @ line)
    return values - (float(values @ line) / square if square else 0.0) * line


def text(runs: Sequence[Run]) -> str:
    """The whole page, in Markdown."""
    first = runs[0]
    epochs = " or ".join(map(str, sorted({run["epoch"][-1] for run in runs})))
    parts = [
        f"Data: {first['data']}; pixels: {first['pixels']}; optimizer: {first['optimizer']}; two "
        f"hidden layers, {first['width']} wide; epochs: {epochs}; "
        f"seeds: {len({run['seed'] for run in runs})}. Accuracy in percent, mean of the last tenth "
        "of the epochs. Readings: mean over layers of the median over training, and over seeds."
    ]
    for activation in dict.fromkeys(run["activation"] for run in runs):
        mine = [run for run in runs if run["activation"] == activation]
        parts += [f"## {activation}", _table(mine)]
        parts += [f"### {activation}: does accuracy follow?", _correlations(mine)]
    return "\n\n".join(parts) + "\n"


def _table(runs: Sequence[Run]) -> str:
    """What was read, by map, learning rate and batch size."""
    rows = []
    for group in _groups(runs):
        run = group[0]
        cells = [run["method"], str(run["batch_size"]), f"{run['learning_rate']:g}"]
        cells.append(f"{statistics.fmean(map(at_the_end, group)):.2f}")
        for measure in MEASURES:
            value = statistics.fmean(typical(each, measure) for each in group)
            cells.append("" if math.isnan(value) else f"{value:.3g}")
        rows.append(cells)
    return markdown(["map", "B", "learning rate", "test accuracy", *MEASURES], rows)


def _groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that differ in seed alone."""
    found: dict[tuple[str, int, float], list[Run]] = {}
    for run in runs:
        key = (run["method"], run["batch_size"], run["learning_rate"])
        found.setdefault(key, []).append(run)
    return list(found.values())


def _correlations(runs: Sequence[Run]) -> str:
    """Rank correlations over maps, batch sizes and learning rates; seeds are averaged first."""
    groups = _groups(runs)

    def over_seeds(measure: str) -> list[float]:
        of_groups = [[typical(run, measure) for run in group] for group in groups]
        return [round(statistics.fmean(values), DIGITS) for values in of_groups]

    accuracy = [statistics.fmean(map(at_the_end, group)) for group in groups]
    rate = over_seeds(RATE)
    rows = []
    for measure in MEASURES:
        values = over_seeds(measure)
        partial = "" if measure == RATE else str(correlation(values, accuracy, rate))
        sign = {1: "+", -1: "−"}.get(STATED.get(measure, 0), "")
        rows.append([measure, sign, str(correlation(values, accuracy)), partial])
    head = ["measure", "stated sign", "rank correlation with accuracy", f"the same given {RATE}"]
    return (
        markdown(head, rows) + f"\n\nOver {len(groups)} networks (maps × batch sizes × learning "
        f"rates); {LEVEL:.0%} intervals, as if these were independent."
    )


def plot(runs: Sequence[Run], file: Path) -> None:
    """A row of panels per measure, a column per activation: mean over layers by step.

    Args:
        runs: as in readings.json; all seeds at the largest batch size are drawn.
        file: where to write the picture.
    """
    activations = list(dict.fromkeys(run["activation"] for run in runs))
    shape = (len(MEASURES), len(activations))
    figure = Figure(figsize=(3.6 * shape[1] + 1.6, 1.7 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False, sharex=True)
    largest = max(run["batch_size"] for run in runs)
    for measure, row in zip(MEASURES, grid, strict=True):
        for activation, axes in zip(activations, row, strict=True):
            for run in runs:
                if (run["activation"], run["batch_size"]) == (activation, largest):
                    style = {"color": COLOURS[run["method"]], "lw": 1, "alpha": 0.7}
                    axes.plot(*by_step(run, measure), **style, label=run["method"])
            axes.set_title(f"{measure}, {activation}", fontsize=9)
            if measure in ("interference_ratio", RATE):
                axes.set_yscale("symlog" if measure == RATE else "log")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    handles, labels = grid[0][0].get_legend_handles_labels()
    of_map = dict(zip(labels, handles, strict=True))
    figure.legend(of_map.values(), of_map, loc="outside right upper", title="map; a line a seed")
    figure.suptitle(f"batch size {largest}; {runs[0]['data']}", fontsize=8)
    figure.savefig(file, dpi=110)


def by_step(run: Run, measure: str) -> tuple[list[int], list[float]]:
    """Steps that were measured, and means over the layers that were."""
    steps, values = [], []
    for step, layers in zip(run["step"], zip(*run[measure], strict=True), strict=True):
        if known := [value for value in layers if value is not None]:
            steps.append(step)
            values.append(statistics.fmean(known))
    return steps, values
