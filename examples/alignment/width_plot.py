"""Plot of the width report."""

import io
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from width_slopes import RATIOS, LayerWidths, Slope

from adiv_monitor.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour = tuple[float, float, float]
_DASHES = ("-", "--", ":", "-.")  # neighbours in the legend differ in these too
_MARKERS = {"alpha": "o", "omega": "s", "u": "^", "cumulative": "x"}


def plot_widths(layers: Sequence[LayerWidths], file: str | PathLike[str], title: str = "") -> None:
    """Plot sizes and moves against width, and alignment slopes; the suffix is the format, or PNG.

    Raises:
        ImportError: without matplotlib (pip install "adiv-monitor[audit]").
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "adiv-monitor[audit]"') from error
    height = max(4.2, 1.2 + 0.6 * len(layers))
    figure = Figure(figsize=(18, height), layout="constrained")
    size, move, exponents = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
    colours = distinct(len(layers))
    for place, layer in enumerate(layers):
        look = colours[place], _DASHES[place % len(_DASHES)]
        _line(size, layer.path, layer.size, look, "")
        _line(move, layer.path, layer.move, look, f" ({layer.verdict})")
    step = layers[0].step
    size.set(title=f"size of outputs after step {step}", xlabel="width", ylabel="RMS(W z)")
    move.set(title=f"their move since the beginning, step {step}", xlabel="width")
    move.set_ylabel("RMS of the change")
    _exponents(exponents, layers)
    figure.suptitle(title)
    path, picture = Path(file), io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:] or "png", dpi=130)
    write_whole({path: picture.getvalue()})


def distinct(count: int) -> list[Colour]:
    """So many colours, of which no two are alike: hues of equal distance, in three shades."""
    shades = ((0.85, 0.9), (1.0, 0.55), (0.45, 0.8))  # saturation and brightness
    return [hsv_to_rgb(place / count, *shades[place % 3]) for place in range(count)]


def _line(
    axes: "Axes", path: str, slope: Slope | None, look: tuple[Colour, str], verdict: str
) -> None:
    if slope is None:
        return
    colour, dashes = look
    by_width: dict[float, list[float]] = {}
    for width, value in slope.points:
        by_width.setdefault(width, []).append(value)
    means = [sum(values) / len(values) for values in by_width.values()]
    axes.plot(*zip(*slope.points, strict=True), ".", color=colour, alpha=0.4)
    label = f"{path}: {slope.value:+.2f}{verdict}"
    axes.plot(list(by_width), means, color=colour, ls=dashes, label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(list(by_width), [f"{width:g}" for width in by_width])
    axes.set_xticks([], minor=True)
    # Beside the lines, so that it hides none.
    axes.legend(title="layer: slope", fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))


def _exponents(axes: "Axes", layers: Sequence[LayerWidths]) -> None:
    """Plot one line per layer: its slopes with intervals, and κ as text."""
    for name in RATIOS:
        shown = [(i, x.exponents[name]) for i, x in enumerate(layers) if name in x.exponents]
        if not shown:
            continue
        shift = 0.16 * (list(RATIOS).index(name) - 1.5)
        axes.errorbar(
            [slope.value for _, slope in shown],
            [i + shift for i, _ in shown],
            xerr=[min(slope.half, 1.0) for _, slope in shown],
            fmt=_MARKERS[name],
            capsize=2,
            label=name,
        )
    for i, layer in enumerate(layers):
        known = [f"{n} {layer.kappas[n]:.2f}" for n in RATIOS if n in layer.exponents]
        axes.annotate("κ: " + ", ".join(known) if known else "", (0.02, i + 0.48), fontsize=7)
    axes.axvline(0.5, color="grey", lw=0.8, ls=":")
    axes.axvline(1.0, color="grey", lw=0.8, ls=":")
    axes.set_yticks(range(len(layers)), [layer.path for layer in layers])
    far = max((s.value + min(s.half, 1.0) for x in layers for s in x.exponents.values()), default=1)
    axes.set(xlim=(0, max(1.3, far + 0.1)), ylim=(len(layers) - 0.4, -0.5))
    axes.set_title("alignment that is left: slope of A·log n, 95 %")
    axes.set_xlabel("½: independent, 1: full")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper right")
