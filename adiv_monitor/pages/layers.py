"""The table of layers at one measured step, with a row per layer."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adiv_monitor.diagnosis.health import measure_title, worst_layers
from adiv_monitor.pages.chain import Part, bar, chain
from adiv_monitor.report import WORST, StepReport, taken
from adiv_monitor.report.wording import cell, listed, number, rows_words

COLUMNS = (
    *("update_cosine", "gradient_cosine", "attainable_cosine", "realised_cosine", "scale_cv"),
    *("common_share", "interference_ratio", "harmed_fraction", "effective_lr", "update_ratio"),
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
    """Return the table of the layers of a report.

    A row has the remaining cosine ("share") with its causes as blocks of a bar, empty without a
    direction, and in words; and the largest cosine that any step of the layer could keep
    ("ceiling"), None if it was not measured.
    """
    measures = taken(report, COLUMNS)
    chains = {path: chain(reading) for path, reading in report.layers.items()}
    lowest = min((p.after for parts in chains.values() for p in parts), default=0.0)
    lowest = max(min(lowest, 0.0), -1.0)
    worst = worst_layers(report)
    rows = [
        {
            "path": path,
            "about": f"{reading.kind} · {rows_words(reading)} rows",
            "bar": bar(chains[path], lowest),
            "words": _bar_words(chains[path]),
            "share": chains[path][-1].after if chains[path] else None,
            "ceiling": _finite(reading.attainable_cosine),
            "cells": [
                Cell(cell(reading, m), _finite(getattr(reading, m)), path in worst.get(m, ()))
                for m in measures
            ],
        }
        for path, reading in report.layers.items()
    ]
    return {"step": report.step, "measures": measures, "rows": rows, "lowest": lowest}


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


def _bar_words(parts: Sequence[Part]) -> str:
    if not parts:
        return "no direction"
    said = [f"cosine {number(parts[-1].after, parts[-1].error)}"]
    for part in parts:
        verb = ("raise" if part.taken < 0 else "lower") + "s" * (len(part.causes) == 1)
        change = number(abs(part.taken), part.error)
        said.append(f"{' and '.join(part.causes)} {verb} it by {change}")
    return ", ".join(said)
