"""All layers at all measured steps, per measure: the data of the heat map.

Hundreds of layers by a hundred steps by every measure must stay light, and each value is to be read
as tables print it, so the texts are made here, once for each that differs, and a cell is the number
of its text.

A measure has the same colours in all runs, so that two pages compare: those of dashboards, by which
verdicts judge, too.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.health import GRADIENT, HEALTH, value_of
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.titles import MEASURE_TITLES
from adiv_monitor.pictures.colours import bar, is_judged, painted, places
from adiv_monitor.printable import printable
from adiv_monitor.report import NO_MAPS, REALISED_MEASURES, WORST, StepReport
from adiv_monitor.report.wording import NOT_FINITE, number

HEAT_MEASURES = (
    "update_ratio",
    GRADIENT,
    "update_cosine",
    "gradient_cosine",
    "diagonal_cosine",
    "attainable_cosine",
    "interference_ratio",
    "scale_cv",
    "scale_mean",
    "common_share",
    "effective_lr",
    "row_cosine_p50",
    "harmed_fraction",
    "idle_share",
    "descent",
    "parameter_cosine",
    "projection_cosine",
    *REALISED_MEASURES,
)
COLOURS = 64
_BLANK, _BROKEN = -1, -2  # no colour, and that of what is not finite
_BY_HEALTH, _IN_ORDER = 0, 1  # palettes


def heat_measures(record: Record, findings: Sequence[Finding] = ()) -> list[str]:
    """The measures that some layer has at some step; first those that findings rest on."""
    costly = [finding for finding in findings if finding.strength != "note"]
    named = [evidence.measure for finding in costly for evidence in finding.evidence]
    order = dict.fromkeys([*(name for name in named if name in HEAT_MEASURES), *HEAT_MEASURES])
    return [name for name in order if any(_values(record, r, name) for r in record.reports)]


def heat_map(record: Record, shown: Iterable[str]) -> dict[str, Any] | None:
    """What the page's script draws the heat map from; None where there is nothing to draw.

    `texts` of a measure are what its cells read, `levels` their colours (-1: none, -2: not finite),
    `cells` the number of each cell's text, layer by layer, as base64 of little-endian numbers of
    `bytes` bytes.
    """
    layers = list(dict.fromkeys(path for report in record.reports for path in report.layers))
    measures = [_measure(measure, record, layers) for measure in shown]
    if not layers or not measures:
        return None
    return {
        "layers": [printable(layer) for layer in layers],
        "steps": [report.step for report in record.reports],
        "palettes": [_palette("update_ratio"), _palette("update_cosine")],
        "measures": measures,
    }


def _values(record: Record, report: StepReport, measure: str) -> Mapping[str, float]:
    if measure == GRADIENT:
        return value_of(record, report, measure)
    return {
        path: value
        for path, reading in report.layers.items()
        if (value := getattr(reading, measure)) is not None
    }


def _measure(name: str, record: Record, layers: Sequence[str]) -> dict[str, Any]:
    numbers: dict[tuple[str, int], int] = {}  # of each text with its colour
    cells: list[int] = []
    columns = [_values(record, report, name) for report in record.reports]
    for layer in layers:
        for report, values in zip(record.reports, columns, strict=True):
            cell = _cell(name, report, layer, values.get(layer))
            cells.append(numbers.setdefault(cell, len(numbers)))
    width = 2 if len(numbers) < 1 << 16 else 4
    packed = np.asarray(cells, dtype=f"<u{width}").tobytes()
    known = HEALTH.get(name)
    title = MEASURE_TITLES.get(name)
    meant = bar(name)
    return {
        "name": name,
        "title": title.title if title is not None else HEALTH[name].title,
        "reads": known.reads if known is not None else f"{MEASURE_TITLES[name].reads}.",
        "palette": _BY_HEALTH if is_judged(name) else _IN_ORDER,
        "bad": WORST.get(name),
        "low": meant.ticks[meant.low],
        "high": meant.ticks[meant.high],
        "span": [round(place * (COLOURS - 1)) for place in (meant.low, meant.high)],
        "texts": [text for text, _ in numbers],
        "levels": [level for _, level in numbers],
        "bytes": width,
        "cells": base64.b64encode(packed).decode(),
    }


def _cell(name: str, report: StepReport, layer: str, value: float | None) -> tuple[str, int]:
    """A cell's text, and its colour."""
    reading = report.layers.get(layer)
    if reading is None or value is None:
        return "", _BLANK
    if math.isnan(value) and reading.non_finite:
        return NOT_FINITE, _BROKEN
    text = number(float(f"{value:.3g}"), reading.standard_error.get(name, 0.0))
    if math.isinf(value) or reading.non_finite:
        return text, _BROKEN
    # Those of gains and offsets are not comparable with the others'.
    is_apart = name in HEALTH and HEALTH[name].of_maps and reading.kind in NO_MAPS
    return text, _BLANK if is_apart else _level(name, float(f"{value:.3g}"))


def _level(name: str, value: float) -> int:
    """The number of a value's colour; in order, 0 is the dark end, where the bad values are."""
    if math.isnan(value):
        return _BLANK
    place = float(places(name, np.asarray(value)))
    level = round(place * (COLOURS - 1))
    is_reversed = WORST.get(name) == "max" and not is_judged(name)
    return COLOURS - 1 - level if is_reversed else level


def _palette(like: str) -> list[str]:
    ramp = painted(like, np.linspace(0, 1, COLOURS))
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in ramp.tolist()]
