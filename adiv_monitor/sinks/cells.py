"""A report for human readers, independent of the output: table cells and text lines."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import NamedTuple

from adiv_monitor.diagnosis.health import worst_layers
from adiv_monitor.report import (
    ALIGNMENT_MEASURES,
    ATTENTION_MEASURES,
    MEASURES,
    REALISED_MEASURES,
    WORST,
    AlignmentReading,
    AttentionReading,
    LayerReading,
    StepReport,
    taken,
)
from adiv_monitor.report.wording import (
    IDLE,
    NOT_FINITE,
    cell,
    not_measured,
    number,
    percent,
    rows_words,
    trained,
)

# Measures that fit a terminal of 120 columns beside a short name; then the optional measures.
TABLE_MEASURES: tuple[str, ...] = (
    *("update_ratio", "update_cosine", "gradient_cosine", "diagonal_cosine", "effective_lr"),
    *("scale_mean", "scale_cv", "interference_ratio", "harmed_fraction", "attainable_cosine"),
    *(*REALISED_MEASURES, *ATTENTION_MEASURES),
    *("alpha", "omega", "u", "cumulative", "kappa_alpha"),
)
# Most rows of a report that is shown by itself; more would push its head off the screen.
MOST_ROWS = 30
MOST_LINES = 10  # most lines of its alarms, and of its notes

MARKS: Mapping[str, str] = {
    "*": "the worst layer, if standard errors can tell which one it is; of update_ratio, the "
    "lowest and the highest layer if they lie outside the healthy range",
    "≈0": "nearer to zero than its standard error",
    "?": "its standard error is not known",
    "–": "no direction (a vector of length zero has none)",
    IDLE: "none of the sampled rows has a gradient",
    NOT_FINITE: "not finite: NaN, infinite or too large",
}

Reading = LayerReading | AttentionReading | AlignmentReading
_KINDS = (MEASURES, ATTENTION_MEASURES, ALIGNMENT_MEASURES)  # each has its own tables


class Row(NamedTuple):
    """A table row: the path, the number of examined rows or samples, and the measures."""

    path: str
    seen: str
    cells: tuple[str, ...]


class Table(NamedTuple):
    """A table of the measures of one kind.

    Attributes:
        titles: titles of the first two columns.
        measures: titles of the other columns.
        rows: rows in the network's order.
        more: a line with the number of rows that are left out; "" if there are none.
    """

    titles: tuple[str, str]
    measures: tuple[str, ...]
    rows: tuple[Row, ...]
    more: str

    def columns(self, first: int, last: int) -> "Table":
        """Return the table with some of its measures only."""
        rows = tuple(row._replace(cells=row.cells[first:last]) for row in self.rows)
        return self._replace(measures=self.measures[first:last], rows=rows)


class Shown(NamedTuple):
    """The readable content of a report, in order.

    Attributes:
        head: the line above the tables.
        tables: one table per kind of measures that was taken.
        legend: meaning of the marks; readers of earlier reports know it already.
        realised: change of the loss; "" if it is not known.
        not_measured: what was not measured, and why; readers of earlier reports know it already.
        said: alarms and notes.
    """

    head: str
    tables: tuple[Table, ...]
    legend: tuple[str, ...]
    realised: str
    not_measured: tuple[str, ...]
    said: tuple[str, ...]


def shown(
    report: StepReport, measures: Iterable[str], rows: int | None = None, lines: int | None = None
) -> Shown:
    """Return the readable content of a report.

    Args:
        report: the report to show.
        measures: measures to show as columns.
        rows: most rows of each table; None: all.
        lines: most alarms, and most notes; None: all.
    """
    columns = taken(report, measures)
    of_kinds = [tuple(measure for measure in columns if measure in kind) for kind in _KINDS]
    tables = tuple(_table(report, of_kind, rows) for of_kind in of_kinds if of_kind)
    return Shown(
        _head(report),
        tables,
        tuple(_legend(tables)),
        _realised_words(report),
        tuple(f"not measured: {line}" for line in not_measured(report)),
        (*_some(report.alarms, "alarm", lines), *_some(report.notes, "note", lines)),
    )


def _table(report: StepReport, measures: tuple[str, ...], most: int | None) -> Table:
    readings, worst = report.readings(measures[0]), worst_layers(report)
    picked = _picked(readings, measures, len(readings) if most is None else most)
    rows = tuple(
        Row(
            path,
            rows_words(readings[path]),
            tuple(cell(readings[path], m) + "*" * (path in worst.get(m, ())) for m in measures),
        )
        for path in picked
    )
    attends = measures[0] in ATTENTION_MEASURES
    titles = ("attention", "samples") if attends else ("layer", "rows")
    more, shown = f"… {len(readings) - len(picked):,} more of {len(readings):,}", "shown are those"
    more = "" if picked == [*readings] else f"{more}: {shown} at the bad ends of the measures"
    return Table(titles, measures, rows, more)


def _head(report: StepReport) -> str:
    """Return the line above the tables."""
    loss = "" if report.loss is None else f" · loss {number(report.loss)}"
    return f"step {report.step} · {percent(report.coverage)} of {trained(report)} measured{loss}"


def _realised_words(report: StepReport) -> str:
    """Return the change of the loss and its expected change; "" if they are not known."""
    if report.realised_loss_change is None or report.descent is None:
        return ""
    real, expected = number(report.realised_loss_change), number(-report.descent)
    return f"the batch's loss changed by {real}; the first-order prediction is {expected}"


def _legend(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the meanings of the marks in the tables."""
    cells = [text for table in tables for row in table.rows for text in row.cells]
    for mark, meaning in MARKS.items():
        if any(text == mark if mark in ("–", IDLE, NOT_FINITE) else mark in text for text in cells):
            yield f"{mark}: {meaning}"


def _picked(readings: Mapping[str, Reading], measures: Iterable[str], most: int) -> list[str]:
    """Choose at most `most` rows of a table of these measures, in the network's order.

    Rows with values that are not finite have priority, then the worst row of each measure that has
    a bad end, then the second worst of each, and so on.
    """
    broken = [path for path, reading in readings.items() if getattr(reading, "non_finite", ())]
    ranks = [_worst_first(readings, measure) for measure in measures if measure in WORST]
    by_rank = [path for paths in zip_longest(*ranks) for path in paths if path is not None]
    kept = set(list(dict.fromkeys(chain(broken, by_rank, readings)))[:most])
    return [path for path in readings if path in kept]


def _worst_first(readings: Mapping[str, Reading], measure: str) -> list[str]:
    values = {path: getattr(reading, measure) for path, reading in readings.items()}
    known = [path for path, value in values.items() if value is not None and value == value]
    return sorted(known, key=lambda path: values[path], reverse=WORST[measure] == "max")


def _some(lines: Iterable[object], what: str, most: int | None) -> list[str]:
    """Return at most `most` lines, and a line with the number of further ones."""
    found = [f"{what}: {line}" for line in lines]
    if most is None or len(found) <= most:
        return found
    return [*found[:most], f"… {len(found) - most:,} more {what}s"]
