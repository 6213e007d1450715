"""All layers at all measured steps, per measure: the data of the heat map.

Hundreds of layers by a hundred steps by every measure must stay light, and each value is to be read
as tables print it, so the texts are made here, once for each that differs, and a cell is the number
of its text.
"""

import base64
import math
from collections.abc import Iterable, Sequence
from statistics import quantiles
from typing import Any

import numpy as np

from adiv_monitor.audit.page.titles import MEASURE_TITLES
from adiv_monitor.printable import printable
from adiv_monitor.report import REALISED_MEASURES, WORST, StepReport
from adiv_monitor.sinks.wording import number

HEAT_MEASURES = (
    "update_cosine",
    "gradient_cosine",
    "diagonal_cosine",
    "attainable_cosine",
    "interference_ratio",
    "scale_cv",
    "scale_mean",
    "common_share",
    "effective_lr",
    "update_ratio",
    "row_cosine_p50",
    "harmed_fraction",
    "idle_share",
    "descent",
    "parameter_cosine",
    "projection_cosine",
    *REALISED_MEASURES,
)
COLOURS = 64
_BLANK = -1  # no colour


def heat_map(reports: Sequence[StepReport], shown: Iterable[str]) -> dict[str, Any] | None:
    """What the page's script draws the heat map from; None where there is nothing to draw.

    `texts` of a measure are what its cells read, `levels` their colours (-1: none), `cells` the
    number of each cell's text, layer by layer, as base64 of little-endian numbers of `bytes` bytes.
    """
    layers = list(dict.fromkeys(path for report in reports for path in report.layers))
    measures = [_measure(measure, reports, layers) for measure in shown]
    if not layers or not measures:
        return None
    return {
        "layers": [printable(layer) for layer in layers],
        "steps": [report.step for report in reports],
        "colours": _colours(),
        "measures": measures,
    }


def _measure(name: str, reports: Sequence[StepReport], layers: Sequence[str]) -> dict[str, Any]:
    title = MEASURE_TITLES[name]
    numbers: dict[str, int] = {}
    values: list[float] = []  # of each text
    cells: list[int] = []
    seen: list[float] = []
    for layer in layers:
        for report in reports:
            reading = report.layers.get(layer)
            value = None if reading is None else getattr(reading, name)
            if reading is None or value is None:
                text, value = "", math.nan
            else:
                error = reading.standard_error.get(name, 0.0)
                value = float(f"{value:.3g}")
                text = number(value, error)
                if math.isfinite(value):
                    seen.append(value)
            if text not in numbers:
                numbers[text] = len(values)
                values.append(value)
            cells.append(numbers[text])
    low, high = _range(seen, title.logarithmic)
    bad = WORST.get(name)
    levels = [_level(value, low, high, title.logarithmic, bad == "max") for value in values]
    width = 2 if len(values) < 1 << 16 else 4
    packed = np.asarray(cells, dtype=f"<u{width}").tobytes()
    return {
        "name": name,
        "title": title.title,
        "reads": title.reads,
        "bad": bad,
        "low": _end(low, min(seen, default=low), "≤"),
        "high": _end(high, max(seen, default=high), "≥"),
        "texts": list(numbers),
        "levels": levels,
        "bytes": width,
        "cells": base64.b64encode(packed).decode(),
    }


def _range(seen: list[float], logarithmic: bool) -> tuple[float, float]:
    """What the colours span: all values but outermost hundredths, which get the end colours."""
    kept = [value for value in seen if value > 0] if logarithmic else seen
    if not kept:
        return 0.0, 1.0
    if len(kept) < 100:
        return min(kept), max(kept)
    ends = quantiles(kept, n=100)
    return ends[0], ends[-1]


def _end(bound: float, extreme: float, beyond: str) -> str:
    """An end of the colours in words."""
    text = f"{bound:.2g}"
    return text if math.isclose(bound, extreme, rel_tol=1e-3) else f"{beyond} {text}"


def _level(value: float, low: float, high: float, logarithmic: bool, bad_high: bool) -> int:
    """The number of a value's colour: 0 is the dark end, where the bad values are."""
    if math.isnan(value):
        return _BLANK
    if logarithmic and low > 0:
        value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
    share = 0.5 if high <= low else min(max((value - low) / (high - low), 0.0), 1.0)
    level = round(share * (COLOURS - 1))
    return COLOURS - 1 - level if bad_high else level


def _colours() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    chosen = colormaps["viridis"]
    return [to_hex(chosen(0.02 + 0.96 * i / (COLOURS - 1))) for i in range(COLOURS)]
