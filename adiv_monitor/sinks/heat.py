"""Pictures of layers × steps by matplotlib, in the network's order, as PNG."""

import io
import math
import warnings
from collections.abc import Collection, Sequence
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.printable import printable
from adiv_monitor.sinks.blocks import blocks, common_stem
from adiv_monitor.sinks.health import HEALTH, Health, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from adiv_monitor.audit.record import Record

# Of the health of a value: too little, as it should be, too much.
_TOO_LITTLE, _HEALTHY, _TOO_MUCH = "#08519c", "#e3ebdf", "#b30000"
_NO_DIRECTION = "#9a9a9a"
_MOST_NAMES = 60  # more layers have the names of their blocks beside them
_MOST_NAMES_OVERVIEW = 15
_MOST_ROWS = 130  # of two pixels, in the overview
_MOST_BLOCKS = 40
_NAME_LENGTH = 34
_HEADLINE_LENGTH = 35  # letters, as wide as the overview; longer ones are set smaller
_INK, _MUTED, _BAD = "#1f2328", "#6b7280", "#b30000"


class Grid(NamedTuple):
    """A measure of all layers at all kept steps.

    Attributes:
        measure: its name.
        layers: paths, in the network's order.
        steps: numbers of the steps.
        values: layers × steps; NaN: no direction, or not measured.
    """

    measure: str
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]

    def only(self, layers: Collection[str]) -> "Grid":
        """The rows of these layers."""
        kept = [i for i, layer in enumerate(self.layers) if layer in layers]
        return self._replace(layers=tuple(self.layers[i] for i in kept), values=self.values[kept])


def grid(record: "Record", measure: str) -> Grid | None:
    """The values of one of `HEALTH` in all reports; None where no layer has any."""
    columns = [value_of(record, report, measure) for report in record.reports]
    layers = tuple(dict.fromkeys(path for report in record.reports for path in report.layers))
    kept = tuple(path for path in layers if any(path in column for column in columns))
    if not kept:
        return None
    values = np.array([[c.get(path, math.nan) for c in columns] for path in kept])
    return Grid(measure, kept, tuple(report.step for report in record.reports), values)


def heat_picture(found: Grid, named: Collection[str] = ()) -> bytes:
    """One measure: a row per layer, a column per kept step, the colours' meaning beside it.

    Args:
        found: the values.
        named: layers that a finding names; their names are in red.
    """
    from matplotlib.figure import Figure

    row = _row_height(len(found.layers))
    height = row * len(found.layers) + 1.15
    figure = Figure(figsize=(8.2, max(height, 2.4)), dpi=100, facecolor="white")
    top = max(height, 2.4)
    axes = figure.add_axes((0.315, 0.5 / top, 0.57, 1 - 1.1 / top))
    _draw(axes, found, named)
    _title(axes, found.measure)
    _colour_bar(figure, (0.9, 0.5 / top, 0.018, 1 - 1.1 / top), found)
    return _png(figure)


def overview_picture(
    grids: Sequence[Grid], headline: str, lines: Sequence[str], named: Collection[str]
) -> bytes:
    """What to know in one screen: the verdict in words, and the front measures side by side.

    As wide and as large in type as TensorBoard's cards, which are small, want it.
    """
    from matplotlib.figure import Figure

    layers = grids[0].layers if grids else ()
    rows = min(max(0.2 * len(layers), 0.6), 2.6)  # inches
    words = 0.8 + 0.29 * len(lines)
    height = words + rows + 1.35
    figure = Figure(figsize=(8.6, height), dpi=100, facecolor="white")
    text: dict[str, Any] = {"va": "top", "color": _INK, "parse_math": False}
    size = 27 * min(1.0, _HEADLINE_LENGTH / len(headline))
    figure.text(0.015, 1 - 0.12 / height, headline, size=size, weight="bold", **text)
    for i, line in enumerate(lines):
        figure.text(0.015, 1 - (0.76 + 0.29 * i) / height, line, size=14, **text)
    names = _names(layers, _MOST_NAMES_OVERVIEW)
    left, gap = 0.03 + 0.0088 * max(map(len, names), default=0), 0.016
    each = (0.99 - left) / max(len(grids), 1)
    for i, found in enumerate(grids):
        place = left + i * each
        axes = figure.add_axes((place, 0.85 / height, each - gap, rows / height))
        own = i == 0 or found.layers != layers
        most = _MOST_NAMES_OVERVIEW if own else 0
        _draw(axes, found, named, names=most, most_rows=_MOST_ROWS, ticks=3)
        axes.tick_params(labelsize=10)
        axes.set_title(HEALTH[found.measure].short, loc="left", size=13, color=_INK)
        _colour_bar(figure, (place, 0.34 / height, each - gap, 0.12 / height), found, flat=True)
    return _png(figure)


def _row_height(layers: int) -> float:
    """Inches: room for a name of 8 points, or less where blocks are named instead."""
    return 0.15 if layers <= _MOST_NAMES else max(0.03, 9.0 / layers)


def _draw(
    axes: "Axes",
    found: Grid,
    named: Collection[str],
    *,
    names: int = _MOST_NAMES,
    most_rows: int | None = None,
    ticks: int = 5,
) -> None:
    """The picture; beside it `names` names at most, of layers or of their blocks."""
    from matplotlib.ticker import NullLocator

    colours, levels = _coloured(found)
    rows, columns = levels.shape
    axes.imshow(
        np.ma.masked_invalid(_pooled(levels, bool(HEALTH[found.measure].knots), most_rows)),
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        vmin=0,
        vmax=1,
    )
    axes.set_facecolor("white")
    axes.tick_params(length=0, labelsize=8, colors=_MUTED, pad=3)
    axes.spines[:].set_visible(False)
    chosen = sorted({round(i * (columns - 1) / (ticks - 1)) for i in range(ticks)})
    axes.set_xticks(chosen, [f"{found.steps[i]:,}" for i in chosen])
    if len(chosen) > 1:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    if not names:
        axes.yaxis.set_major_locator(NullLocator())
        return
    _name_rows(axes, found.layers, named, names)


def _named(layers: tuple[str, ...], most: int) -> dict[str, tuple[str, ...]]:
    """Name → its layers: each of its own, or blocks of neighbours where there are too many."""
    if len(layers) <= most:
        return {path: (path,) for path in layers}
    return blocks(layers, most=min(most, _MOST_BLOCKS))


def _names(layers: tuple[str, ...], most: int) -> list[str]:
    stem = common_stem(layers)
    return [_short(printable(name), printable(stem)) for name in _named(layers, most)]


def _name_rows(axes: "Axes", layers: tuple[str, ...], named: Collection[str], most: int) -> None:
    """Names that would lie on each other give way, those that no finding names first."""
    groups = _named(layers, most)
    first = [layers.index(block[0]) for block in groups.values()]
    ends = [*first[1:], len(layers)]
    middles = [(a + b - 1) / 2 for a, b in zip(first, ends, strict=True)]
    marked = [any(path in named for path in block) for block in groups.values()]
    apart = 0.8 * len(layers) / most if len(groups) < len(layers) else 0.0
    kept: list[int] = []
    for i in sorted(range(len(groups)), key=lambda i: not marked[i]):
        if all(abs(middles[i] - middles[j]) >= apart for j in kept):
            kept.append(i)
    names = _names(layers, most)
    axes.set_yticks([middles[i] for i in kept], [names[i] for i in kept], color=_INK)
    if apart:
        axes.hlines([i - 0.5 for i in first[1:]], -0.5, axes.get_xlim()[1], color="white", lw=0.8)
    for i, label in zip(kept, axes.get_yticklabels(), strict=True):
        label.set_parse_math(False)  # a path may have a "$"
        if marked[i]:
            label.set_color(_BAD)
            label.set_fontweight("bold")


def _short(path: str, stem: str) -> str:
    path = path.removeprefix(stem) or path
    if len(path) <= _NAME_LENGTH:
        return path
    return f"{path[: _NAME_LENGTH // 3]}…{path[-(_NAME_LENGTH - _NAME_LENGTH // 3 - 1) :]}"


def _title(axes: "Axes", measure: str) -> None:
    health = HEALTH[measure]
    axes.set_title(f"{health.title} ({measure})", loc="left", size=12, color=_INK, pad=20)
    axes.annotate(
        health.reads,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        size=8.5,
        color=_MUTED,
        parse_math=False,
    )


def _pooled(levels: NDArray[np.float64], healthy: bool, most: int | None) -> NDArray[np.float64]:
    """Of neighbouring layers that share a row, the one furthest from healthy, or darkest."""
    if most is None or len(levels) <= most:
        return levels
    together = -(-len(levels) // most)
    far = np.abs(levels - 0.5) if healthy else -levels
    far = np.where(np.isnan(levels), -np.inf, far)
    found = []
    for begin in range(0, len(levels), together):
        worst = far[begin : begin + together].argmax(axis=0)
        found.append(levels[begin + worst, np.arange(levels.shape[1])])
    return np.stack(found)


# --- colours -------------------------------------------------------------------------------------


def _coloured(found: Grid) -> tuple["Colormap", NDArray[np.float64]]:
    """Colours, and for each value its place among them, 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    health = HEALTH[found.measure]
    if health.knots:
        colours: Colormap = LinearSegmentedColormap.from_list(
            "health", [_TOO_LITTLE, _HEALTHY, _HEALTHY, _HEALTHY, _TOO_MUCH]
        )
        levels = (health.level(found.values) + 1) / 2
    else:
        colours = colormaps["viridis"].copy()
        low, high = _range(found)
        scaled = _scaled(found.values, health, low)
        low, high = (float(_scaled(np.asarray(v), health, low)) for v in (low, high))
        levels = np.clip((scaled - low) / (high - low if high > low else 1), 0, 1)
    colours = colours.with_extremes(bad=_NO_DIRECTION)
    return colours, levels


def _range(found: Grid) -> tuple[float, float]:
    """Of the values, without the outermost hundredths."""
    values = found.values[np.isfinite(found.values)]
    if HEALTH[found.measure].logarithmic:
        values = values[values > 0]
    seen = values.tolist()
    if len(seen) < 2:
        return (seen[0], seen[0]) if seen else (0.0, 1.0)
    ends = quantiles(seen, n=100, method="inclusive")
    return ends[0], ends[-1]


def _scaled(values: NDArray[np.float64], health: Health, least: float) -> NDArray[np.float64]:
    return np.log(np.maximum(values, max(least, 1e-300))) if health.logarithmic else values


def _colour_bar(
    figure: "Figure", box: tuple[float, float, float, float], found: Grid, *, flat: bool = False
) -> None:
    """What the colours stand for: the limits where they are known, else the ends."""
    axes = figure.add_axes(box)
    health = HEALTH[found.measure]
    colours, _ = _coloured(found)
    ramp = np.linspace(0, 1, 128)
    lowest, ticks = 0.0, {0.0: "", 1.0: ""}
    if health.knots:
        places = {(level + 1) / 2: f"{value:g}" for value, level in health.knots}
        lowest, ticks = min(places), places
        ramp = np.linspace(min(places), max(places), 128)
    else:
        low, high = _range(found)
        ticks = {0.0: f"{low:.2g}", 1.0: f"{high:.2g}"}
    highest = max(ticks)
    picture = ramp[None, :] if flat else ramp[:, None]
    extent = (lowest, highest, 0, 1) if flat else (0, 1, lowest, highest)
    axes.imshow(picture, aspect="auto", origin="lower", cmap=colours, vmin=0, vmax=1, extent=extent)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2, labelsize=8, colors=_MUTED, pad=2)
    if flat:
        ticks = {at: text for at, text in ticks.items() if 0 < at < 1} if health.knots else ticks
        axes.set_xticks(list(ticks), list(ticks.values()))
        if not health.knots:
            axes.get_xticklabels()[0].set_horizontalalignment("left")
            axes.get_xticklabels()[-1].set_horizontalalignment("right")
        axes.set_yticks([])
    else:
        axes.yaxis.tick_right()
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_xticks([])


def _png(figure: "Figure") -> bytes:
    target = io.BytesIO()
    with warnings.catch_warnings():
        # Paths may have letters that the font lacks: they are boxes here, and whole in the texts.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(target, format="png")
    return target.getvalue()
