"""Matplotlib pictures as SVG that uses the page's colours and fonts."""

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import printable

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Unique placeholder colours, which are replaced by the page's colours, light or dark.
_COLOURS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "accent": "#040404",
    "second": "#050505",
}
_STYLE: dict[Any, Any] = {  # mypy does not accept plain strings as matplotlib's names
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "adiv-monitor",  # makes the output deterministic
    "text.parse_math": False,
    "font.size": 12,
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _COLOURS["line"],
    "ytick.color": _COLOURS["line"],
    "xtick.labelcolor": _COLOURS["muted"],
    "ytick.labelcolor": _COLOURS["muted"],
    "text.color": _COLOURS["ink"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
}
_HIGHEST = 1e300  # above it, the ends of an axis overflow


def loss_picture(*records: Record) -> "Markup":
    """Draw loss by step of one run, or of two, A and B.

    Of one run, also the measured steps, the loss of a constant prediction and the gradient norm, as
    far as they are known.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    alone = records[0] if len(records) == 1 else None
    with rc_context(_STYLE):
        norms = [v if _is_drawn(v) else math.nan for v in alone.gradient_norms] if alone else []
        figure = Figure(figsize=(12.8, 5.2 if norms else 3.8))
        heights = (2.4, 1) if norms else (1,)
        parts = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        bottom = 0.1 if norms else 0.14
        figure.subplots_adjust(left=0.07, right=0.99, top=0.97, bottom=bottom, hspace=0.16)
        loss = parts[0, 0]
        for name, record, colour in zip("AB", records, ("accent", "second"), strict=False):
            _draw_losses(loss, record.steps_of_losses, record.losses, colour, name)
        # Set before marking the measured steps, whose marks need no room on the axis.
        _set_scale(loss, [value for record in records for value in record.losses])
        loss.set_ylabel("loss")
        if alone:
            _mark(loss, alone)
        else:
            loss.legend(frameon=False, labelcolor="linecolor")
        for norm in parts[1:, 0]:
            norm.plot(range(len(norms)), norms, color=_COLOURS["second"], linewidth=1.4)
            _set_scale(norm, norms)
            if alone and (clip := alone.facts.clip_norm) is not None and _is_drawn(clip):
                norm.axhline(clip, color=_COLOURS["ink"], linewidth=1, dashes=(3, 2))
            norm.set_ylabel("‖gradient‖")
        parts[-1, 0].set_xlabel("step")
        words = [_course_words(record.losses, record.steps_of_losses) for record in records]
        said = words if alone else [f"{name}: {w}" for name, w in zip("AB", words, strict=True)]
        return _svg(figure, "loss", f"Loss by step: {'; '.join(said)}.")


def _mark(loss: "Axes", record: Record) -> None:
    """Mark the measured steps, and the loss of a constant prediction."""
    if record.chance is not None and _is_drawn(record.chance):
        loss.axhline(record.chance, color=_COLOURS["muted"], linewidth=1, linestyle=":")
    steps = [report.step for report in record.reports]
    look: dict[str, Any] = {"linestyle": "", "marker": "|", "markersize": 7}
    at = loss.get_xaxis_transform()
    loss.plot(steps, [0.0] * len(steps), transform=at, clip_on=False, color=_COLOURS["ink"], **look)


def _draw_losses(
    axes: "Axes", steps: Sequence[int], losses: Sequence[float], colour: str, name: str
) -> None:
    known = [(s, loss) for s, loss in zip(steps, losses, strict=True) if _is_drawn(loss)]
    line = [step for step, _ in known], [loss for _, loss in known]
    axes.plot(*line, color=_COLOURS[colour], linewidth=1.8, label=name)
    if losses and not _is_drawn(losses[-1]):
        words = "not finite" if not math.isfinite(losses[-1]) else "too large"
        mark: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": _COLOURS["ink"]}
        axes.plot([steps[-1]], [0.94], marker="x", markersize=8, markeredgewidth=2, **mark)
        axes.text(steps[-1] - 0.5, 0.9, f"{words} ", ha="right", fontsize=12, **mark)


def _set_scale(axes: "Axes", values: Sequence[float]) -> None:
    finite = [value for value in values if _is_drawn(value)]
    if finite and min(finite) > 0 and max(finite) > 20 * min(finite):
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _is_drawn(value: float) -> bool:
    """Return whether the value is finite and small enough for an axis."""
    return abs(value) < _HIGHEST  # False for NaN


def _course_words(losses: Sequence[float], steps: Sequence[int]) -> str:
    if not losses:
        return "no step"
    return f"{losses[0]:.3g} at step {steps[0]}, {losses[-1]:.3g} at step {steps[-1]}"


def _svg(figure: "Figure", name: str, words: str) -> "Markup":
    """Return the figure as an SVG element of the page, with a description for screen readers."""
    from markupsafe import Markup, escape

    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Make identifiers unique; use the page's fonts and colours.
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: (?:\w+ )*?([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for colour, drawn in _COLOURS.items():
        svg = svg.replace(drawn, f"var(--{colour})")
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    head = f'<svg {view_box[0]} role="img" aria-labelledby="{name}-words" class="picture">'
    head += f'<title id="{name}-words">{escape(printable(words))}</title>'
    return Markup(head + svg[svg.index(">") + 1 :])
