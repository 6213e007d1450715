"""The what-if tables: a measure of each layer as it is and under alternatives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from adiv_monitor.diagnosis.record import Alternative
from adiv_monitor.pages.layers import Cell
from adiv_monitor.report.wording import number

# Measure → heading of its table; the first is open if a page has room for only one.
WHAT_IF_MEASURES = {
    "gradient_cosine": "Cosine of a plain gradient step: nearer to 1 is better",
    "scale_cv": "Spread of the row scales: 0 is best",
    "effective_lr": "Effective learning rate of a plain gradient step with learning rate 1: "
    "equal in all layers is best",
}


@dataclass(frozen=True)
class WhatIf:
    """A what-if table of one measure."""

    measure: str
    heading: str
    alternatives: tuple[str, ...]
    medians: tuple[Cell, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def what_if_tables(what_if: Mapping[str, Mapping[str, Alternative]]) -> list[WhatIf]:
    """Return one table per measure, with a row per layer and a column per alternative."""
    if not what_if:
        return []
    names = tuple(dict.fromkeys(name for of_layer in what_if.values() for name in of_layer))
    return [_table(what_if, names, measure) for measure in WHAT_IF_MEASURES]


def _table(
    what_if: Mapping[str, Mapping[str, Alternative]], names: tuple[str, ...], measure: str
) -> WhatIf:
    columns = {
        name: [
            getattr(of_layer[name], measure) for of_layer in what_if.values() if name in of_layer
        ]
        for name in names
    }
    medians = []
    for values in columns.values():
        finite = [value for value in values if math.isfinite(value)]
        medians.append(_cell(median(finite)) if finite else Cell("–", None))
    rows = tuple(
        (
            path,
            tuple(
                _cell(getattr(of_layer[name], measure)) if name in of_layer else Cell("", None)
                for name in names
            ),
        )
        for path, of_layer in what_if.items()
    )
    return WhatIf(measure, WHAT_IF_MEASURES[measure], names, tuple(medians), rows)


def _cell(value: float) -> Cell:
    return Cell(number(value), value if math.isfinite(value) else None)
