"""The data of the page's heat map: all layers at all measured steps, per measure.

The data must stay small for hundreds of layers by a hundred steps by every measure, and each value
reads as tables print it. So each distinct text is made here once, and a cell is the index of its
text.
"""

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.health import GRADIENT, MEASURE_TITLES, measure_title, value_of
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pictures.colours import bar, is_judged, painted
from adiv_monitor.pictures.grid import Grid, grids, layers_of, legend
from adiv_monitor.printable import printable
from adiv_monitor.report import REALISED_MEASURES, WORST
from adiv_monitor.report.wording import cell, number

HEAT_MEASURES = (
    *("update_ratio", GRADIENT, "update_cosine", "gradient_cosine", "diagonal_cosine"),
    *("attainable_cosine", "interference_ratio", "scale_cv", "scale_mean", "common_share"),
    *("effective_lr", "row_cosine_p50", "harmed_fraction", "idle_share", "descent"),
    *("parameter_cosine", "projection_cosine", *REALISED_MEASURES),
)
COLOURS = 64
_BLANK, _BROKEN = -1, -2  # no colour, and the colour of values that are not finite


def heat_measures(record: Record, findings: Sequence[Finding] = ()) -> list[str]:
    """Return the measures that some layer has at some step; those that are evidence come first."""
    costly = [finding for finding in findings if finding.strength != "note"]
    named = [evidence.measure for finding in costly for evidence in finding.evidence]
    order = dict.fromkeys([*(name for name in named if name in HEAT_MEASURES), *HEAT_MEASURES])
    return [name for name in order if any(value_of(record, r, name) for r in record.reports)]


def heat_map(record: Record, shown: Iterable[str]) -> dict[str, Any] | None:
    """Return the data from which the page's script draws the heat map; None without any.

    For each measure, `texts` are the distinct texts of its cells, `levels` their colours (-1: none,
    -2: not finite), `cells` the index of each cell's text, layer by layer, as base64 of
    little-endian numbers of `bytes` bytes.
    """
    layers = layers_of(record)
    found = grids(record, shown, layers)
    if not found:
        return None
    ramps = {name: _ramp(name) for name in found}
    palettes = list(dict.fromkeys(ramps.values()))
    return {
        "layers": [printable(layer) for layer in layers],
        "steps": [report.step for report in record.reports],
        "palettes": palettes,
        "legend": list(dict.fromkeys(mark for name in found for mark in legend(name))),
        "measures": [
            _measure(record, one) | {"palette": palettes.index(ramps[name])}
            for name, one in found.items()
        ],
    }


def _measure(record: Record, found: Grid) -> dict[str, Any]:
    texts = [_text(record, found, row, column) for row, column in np.ndindex(found.values.shape)]
    numbers: dict[tuple[str, int], int] = {}  # index of each pair of text and colour
    cells = [
        numbers.setdefault(cell, len(numbers))
        for cell in zip(texts, _levels(found).ravel().tolist(), strict=True)
    ]
    width = 2 if len(numbers) < 1 << 16 else 4
    packed = np.asarray(cells, dtype=f"<u{width}").tobytes()
    name, meant = found.measure, bar(found.measure)
    # The bad end is named if the colours don't show it.
    bad = None if is_judged(name) else WORST.get(name)
    return {
        "name": name,
        "title": measure_title(name),
        "reads": MEASURE_TITLES[name].reads,
        "low": ("worse " if bad == "min" else "") + meant.ticks[meant.low],
        "high": meant.ticks[meant.high] + (" worse" if bad == "max" else ""),
        "span": [round(place * (COLOURS - 1)) for place in (meant.low, meant.high)],
        "healthy": meant.healthy,
        "marks": [mark.kind for mark in legend(name)],
        "texts": [text for text, _ in numbers],
        "levels": [level for _, level in numbers],
        "bytes": width,
        "cells": base64.b64encode(packed).decode(),
    }


def _text(record: Record, found: Grid, row: int, column: int) -> str:
    """Format a value as tables print it, comparable or not; "" if there is none."""
    reading = record.reports[column].layers.get(found.layers[row])
    known = reading is not None and not math.isnan(found.values[row, column])
    value = found.values[row, column] if known else getattr(reading, found.measure, None)
    if reading is None or value is None:
        return ""
    if math.isnan(value):
        return cell(reading, found.measure)
    return number(float(f"{value:.3g}"), reading.standard_error.get(found.measure, 0.0))


def _levels(found: Grid) -> NDArray[np.int_]:
    """Return the index of every cell's colour."""
    places = found.places
    levels = np.nan_to_num(places * (COLOURS - 1)).round().astype(int)
    return np.where(found.not_finite, _BROKEN, np.where(np.isnan(places), _BLANK, levels))


def _ramp(measure: str) -> tuple[str, ...]:
    """Return the measure's colours, from small to large."""
    ramp = painted(measure, np.linspace(0, 1, COLOURS))
    return tuple(f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in ramp.tolist())
