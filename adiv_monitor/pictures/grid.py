"""The heat map of one measure over all layers and all kept steps, for pages and pictures."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adiv_monitor.diagnosis.health import value_of
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.pictures.colours import bar, is_judged, places


class Grid(NamedTuple):
    """The cells of a heat map.

    Attributes:
        measure: name of the measure.
        layers: paths, in the network's order.
        steps: numbers of the steps.
        values: layers × steps; NaN: no direction, not measured, or not comparable.
        not_finite: layers × steps; True where inputs, outputs, gradient or update of the layer, or
            the value itself, are NaN or infinite.
    """

    measure: str
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float64]
    not_finite: NDArray[np.bool_]

    @property
    def places(self) -> NDArray[np.float64]:
        """Places of the values among the measure's colours, 0 to 1; NaN stays."""
        return places(self.measure, self.values)


def grid(record: Record, measure: str, layers: Sequence[str] | None = None) -> Grid | None:
    """Return the heat map of one measure in all reports; None if no layer has it.

    Args:
        record: record with the reports.
        measure: name of the measure, or `GRADIENT`.
        layers: layers to show, even without the measure; None: those that have it at some step.
    """
    columns = [value_of(record, report, measure) for report in record.reports]
    order = dict.fromkeys([*layers_of(record), *(path for column in columns for path in column)])
    having = [path for path in order if any(path in column for column in columns)]
    shown = tuple(having if layers is None else layers)
    if not having or not shown:
        return None
    values = np.array([[c.get(path, math.nan) for c in columns] for path in shown])
    flawed = [
        [bool(getattr(report.layers.get(path), "non_finite", ())) for report in record.reports]
        for path in shown
    ]
    steps = tuple(report.step for report in record.reports)
    return Grid(measure, shown, steps, values, np.array(flawed) | np.isinf(values))


def grids(
    record: Record, measures: Iterable[str], layers: Sequence[str] | None = None
) -> dict[str, Grid]:
    """Return the heat maps by measure, of measures that some layer has; arguments as in `grid`."""
    found = {measure: grid(record, measure, layers) for measure in measures}
    return {measure: one for measure, one in found.items() if one is not None}


def layers_of(record: Record) -> tuple[str, ...]:
    """Return all layers of the reports, in the network's order."""
    return tuple(dict.fromkeys(path for report in record.reports for path in report.layers))


class Mark(NamedTuple):
    """One entry of a legend.

    Attributes:
        kind: name of the symbol beside the words: "healthy", "too-little", "too-much",
            "healthy-range", "not-finite" or "no-value".
        words: meaning of the symbol.
    """

    kind: str
    words: str


def legend(measure: str) -> tuple[Mark, ...]:
    """Return the legend of a measure's heat map, beside its colour bar."""
    order = Mark("healthy-range", "healthy range")
    health = (
        Mark("healthy", "healthy"),
        Mark("too-little", "too little"),
        Mark("too-much", "too much"),
    )
    return (
        *(health if is_judged(measure) else (order,) if bar(measure).healthy is not None else ()),
        Mark("not-finite", "NaN or infinite"),
        Mark("no-value", "no value"),
    )
