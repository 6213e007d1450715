"""A report as a table in the terminal."""

import math
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from adiv_monitor.report import WORST, LayerReading, StepReport
from adiv_monitor.sinks.scalars import known_measures, taken

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# As many as fit a terminal of 120 columns beside a short name; the last where it was asked for.
TABLE_MEASURES: tuple[str, ...] = (
    "update_cosine",
    "gradient_cosine",
    "diagonal_cosine",
    "effective_lr",
    "scale_mean",
    "scale_cv",
    "interference_ratio",
    "harmed_fraction",
    "attainable_cosine",
)

_ENDLESS = 10_000  # characters


class TableSink:
    """Prints every report as a table: a row per layer, a column per measure.

    "–" stands for "no direction" (NaN), a blank for a measure that was not taken, and `*` (in
    colour where the terminal has any) marks the worst value of a measure. A terminal that is too
    narrow gets the measures in several tables. Layers that were not measured and the report's
    notes follow below.

    Args:
        measures: the columns, by name.
        file: where to print; standard output when None.

    Raises:
        ImportError: without the package rich.
        ValueError: when there is no measure of that name.
    """

    def __init__(
        self, measures: Iterable[str] = TABLE_MEASURES, file: IO[str] | None = None
    ) -> None:
        self._measures = known_measures(measures)
        self._console = _console(file)

    def write(self, report: StepReport) -> None:
        """Print the report."""
        print_line = self._console.out
        print_line(f"step {report.step} · {report.coverage:.0%} of the parameters measured")
        for table in _tables(report, taken(report, self._measures), self._console):
            self._console.print(table)
        for path, reason in report.unsupported.items():
            print_line(f"not measured: {path}: {reason}")
        for note in report.notes:
            print_line(f"note: {note}")

    def close(self) -> None:
        """Nothing to finish: the file belongs to whoever opened it."""


def _console(file: IO[str] | None) -> "Console":
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            'TableSink needs the package rich: pip install "adiv-monitor[audit]"'
        ) from error
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _ENDLESS  # a file is as wide as its lines
    return console


def _tables(report: StepReport, measures: tuple[str, ...], console: "Console") -> Iterator["Table"]:
    """One table where it fits the console, else the measures in as few as do."""
    worst = _worst(report)
    unbounded = console.options.update(width=_ENDLESS)
    while measures:
        count = len(measures)
        table = _table(report, measures, worst)
        while count > 1 and console.measure(table, options=unbounded).maximum > console.width:
            count -= 1
            table = _table(report, measures[:count], worst)
        yield table
        measures = measures[count:]


def _table(report: StepReport, measures: tuple[str, ...], worst: dict[str, float]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nlayer", overflow="fold")
    table.add_column("\nrows", justify="right", no_wrap=True)
    for measure in measures:
        # The blank below each header's last letter is where "*" stands in the rows.
        words = "\n".join(f"{word} " for word in measure.rsplit("_", 1))
        table.add_column(words, justify="right", no_wrap=True)
    for path, reading in report.layers.items():
        values = {measure: getattr(reading, measure) for measure in measures}
        cells = [_cell(value, worst.get(measure)) for measure, value in values.items()]
        table.add_row(Text(path), _rows(reading), *cells)
    return table


def _worst(report: StepReport) -> dict[str, float]:
    """The worst value of every measure that has a bad end, unless all layers are equally good."""
    return {
        measure: summary.min if WORST[measure] == "min" else summary.max
        for measure, summary in report.summary().items()
        # equal but for rounding
        if measure in WORST and not math.isclose(summary.min, summary.max, rel_tol=1e-6)
    }


def _cell(value: float | None, worst: float | None) -> str:
    if value is None:
        return ""
    return f"[bold red]{_number(value)}*[/]" if value == worst else f"{_number(value)} "


def _number(value: float) -> str:
    """Three decimals where they say something, powers of ten elsewhere."""
    if math.isnan(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}"
    return f"{value:.1e}"


def _rows(reading: LayerReading) -> str:
    if reading.rows_seen == reading.rows_total:
        return f"{reading.rows_total:,}"
    return f"{reading.rows_seen:,} of {reading.rows_total:,}"
