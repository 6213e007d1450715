"""The table of layers at one measured step, with a row per layer."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from adiv_monitor.diagnosis.health import measure_title, worst_layers
from adiv_monitor.report import WORST, StepReport, taken
from adiv_monitor.report.wording import cell, listed, number, rows_words

COLUMNS = (
    *("diagonal_cosine", "gradient_cosine", "update_cosine", "realised_cosine"),
    *("attainable_cosine", "scale_cv", "common_share", "interference_ratio", "harmed_fraction"),
    *("effective_lr", "update_ratio"),
)
# Measures whose worst layer is named, and that comparisons show.
NAMED = (
    *("update_cosine", "gradient_cosine", "scale_cv", "interference_ratio", "harmed_fraction"),
    "effective_lr",
)


@dataclass(frozen=True)
class Cell:
    """A value as it is printed, and for sorting; `worst` if the errors leave one candidate.

    `blanks` as wide as a digit replace the decimals that are missing up to three, so that
    right-aligned decimal points are below each other.
    """

    text: str
    value: float | None
    worst: bool = False

    @property
    def blanks(self) -> str:
        """Blanks in place of missing decimals."""
        _, point, decimals = self.text.partition(".")
        if "e" in self.text or not self.text[-1:].isdigit():
            return ""
        return "\u2007" * (3 - len(decimals)) + "\u2008" * (not point)


class End(NamedTuple):
    """The bad end of a measure, or one of both ends if neither is bad.

    Attributes:
        title: title of the measure, with the end if both are named.
        text: the value at this end.
        layers: layers that may have the value; one, if the errors leave one candidate.
    """

    title: str
    text: str
    layers: tuple[str, ...]


def layer_table(report: StepReport) -> dict[str, Any]:
    """Return the table of the layers of a report."""
    measures = taken(report, COLUMNS)
    worst = worst_layers(report)
    rows = [
        {
            "path": path,
            "about": f"{reading.kind} · {rows_words(reading)} rows",
            "cells": [
                Cell(cell(reading, m), _finite(getattr(reading, m)), path in worst.get(m, ()))
                for m in measures
            ],
        }
        for path, reading in report.layers.items()
    ]
    return {"step": report.step, "measures": measures, "rows": rows}


def worst(report: StepReport, measures: Collection[str] = NAMED) -> Iterator[End]:
    """Yield the bad ends of measures, as far as errors separate the layers, but no ideal ones."""
    for measure, summary in report.summary().items():
        if measure not in measures or summary.min_layers == summary.max_layers:
            continue
        bad, readings = WORST.get(measure), report.readings(measure)
        ends = (
            ("min", "lowest", summary.min, summary.min_layers, summary.min > 1 - 1e-3),
            ("max", "highest", summary.max, summary.max_layers, summary.max == 0),
        )
        for end, which, value, layers, is_ideal in ends:
            if bad is None or (bad == end and not is_ideal):
                title = measure_title(measure) + f", {which}" * (bad is None)
                error = min(readings[path].standard_error.get(measure, 0.0) for path in layers)
                yield End(title, number(value, error), layers)


def worst_lines(report: StepReport, measures: Collection[str] = NAMED) -> list[str]:
    """Return `worst` as lines of Markdown."""
    return [
        f"- {end.title}: {end.text} in {'one of ' * (len(end.layers) > 1)}"
        + listed(list(end.layers), as_code=True)
        for end in worst(report, measures)
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
