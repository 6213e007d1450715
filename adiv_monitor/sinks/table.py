"""A report as a table in the terminal."""

import math
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from adiv_monitor.printable import printable
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
)
from adiv_monitor.sinks.scalars import known_measures, taken
from adiv_monitor.sinks.wording import not_measured, number, percent, trained

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# As many as fit a terminal of 120 columns beside a short name; then those that were asked for.
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
    *REALISED_MEASURES,
    *ATTENTION_MEASURES,
    *("alpha", "omega", "u", "cumulative", "kappa_alpha"),
)

_MARKS = {
    "*": "the worst layer, where the errors tell which that is",
    "≈0": "nearer to zero than its standard error",
    "?": "with an error that is not known",
    "–": "no direction (a vector of length zero has none)",
    "NaN": "not finite: NaN, infinite or too large",
}

Reading = LayerReading | AttentionReading | AlignmentReading
_ENDLESS = 10_000  # characters


class TableSink:
    """Prints every report as a table: a row per layer, a column per measure.

    Measures of attention and of alignment have tables of their own, below.

    Values that rest on sampled rows are printed to the digits that their standard errors leave:
    0.0431 ± 0.012 reads 0.04. "≈0" is a value that lies closer to zero than its error, which has no
    sign; "?" one whose error is not known; "–" stands for "no direction", "NaN" for what is not
    finite, a blank for a measure that was not taken. `*` (in colour where the terminal has any)
    marks the worst value of a measure, where the errors tell which that is (see
    `StepReport.summary`). A terminal that is too narrow gets the measures in several tables. The
    report's alarms and notes follow below, and, when they are news, what marks mean and the layers
    and parameters that were not measured.

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
        self._file = file
        self._console = _console(file)
        self._said: set[str] = set()

    def write(self, report: StepReport) -> None:
        """Print the report."""
        try:
            self._show(report)
        except OSError:  # the disk is full, the pipe closed: what waits to be printed is given up
            self._console = _console(self._file)
            raise

    def _show(self, report: StepReport) -> None:
        share = percent(report.coverage)
        self._print(f"step {report.step} · {share} of {trained(report)} measured")
        shown = taken(report, self._measures)
        for kind in (MEASURES, ATTENTION_MEASURES, ALIGNMENT_MEASURES):
            of_kind = tuple(measure for measure in shown if measure in kind)
            for table in _tables(report, of_kind, self._console):
                self._console.print(table)
        self._say_once(_legend(report, shown))
        if report.realised_loss_change is not None and report.descent is not None:
            real, expected = number(report.realised_loss_change), number(-report.descent)
            self._print(f"the batch's loss really changed by {real}, to first order by {expected}")
        self._say_once(f"not measured: {line}" for line in not_measured(report))
        for alarm in report.alarms:
            self._print(f"alarm: {alarm}")
        for note in report.notes:
            self._print(f"note: {note}")

    def _say_once(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line not in self._said:
                self._print(line)
                self._said.add(line)

    def _print(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(line)))

    def close(self) -> None:
        """Nothing to finish: the file belongs to whoever opened it."""


def _console(file: IO[str] | None) -> "Console":
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            'TableSink needs the package rich: pip install "adiv-monitor[audit]"'
        ) from error

    class Unbroken(Console):
        """Leaves it to the monitor what a closed pipe means to the training."""

        def on_broken_pipe(self) -> None:
            raise  # rich would end the process

    console = Unbroken(file=file, highlight=False)
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


def _table(report: StepReport, measures: tuple[str, ...], worst: dict[str, str | None]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    readings = report.readings(measures[0])
    attends = measures[0] in ATTENTION_MEASURES
    table.add_column("\nattention" if attends else "\nlayer", overflow="fold")
    table.add_column("\nsamples" if attends else "\nrows", justify="right", no_wrap=True)
    columns = []
    for measure in measures:
        head = [f"{word} " for word in measure.rsplit("_", 1)]
        cells = [_cell(r, measure, path == worst.get(measure)) for path, r in readings.items()]
        width = max(map(len, [*head, *cells]))
        # Aligned here: rich would take the blanks off that keep decimal points below each other.
        table.add_column("\n".join(word.rjust(width) for word in head), no_wrap=True)
        columns.append([Text(c.rjust(width), "bold red" if "*" in c else "") for c in cells])
    for (path, reading), *row in zip(readings.items(), *columns, strict=True):
        table.add_row(Text(printable(path)), _looked_at(reading), *row)
    return table


def _legend(report: StepReport, measures: Iterable[str]) -> Iterator[str]:
    """What the marks in the report's tables mean."""
    worst = _worst(report)
    cells = [
        _cell(reading, measure, path == worst.get(measure))
        for measure in measures
        for path, reading in report.readings(measure).items()
    ]
    for mark, meaning in _MARKS.items():
        if any(cell.strip() == mark if mark in "–NaN" else mark in cell for cell in cells):
            yield f"{mark}: {meaning}"


def _worst(report: StepReport) -> dict[str, str | None]:
    """The worst layer of every measure that has a bad end, where it is told which that is."""
    return {
        measure: summary.min_layer if WORST[measure] == "min" else summary.max_layer
        for measure, summary in report.summary().items()
        if measure in WORST and summary.min_layers != summary.max_layers  # else there is but one
    }


def _cell(reading: Reading, measure: str, starred: bool) -> str:
    """The value, its mark, and blanks for the decimals that are missing to three."""
    value = getattr(reading, measure)
    if value is None:
        return ""
    if math.isnan(value) and isinstance(reading, LayerReading) and reading.non_finite:
        return "NaN "
    shown = number(value, reading.standard_error.get(measure, 0.0))
    point, decimals = shown.partition(".")[1:]
    fixed = shown[-1].isdigit() and "e" not in shown
    missing = 4 - len(point + decimals) if fixed else 0
    return shown + ("*" if starred else " ") + " " * missing


def _looked_at(reading: Reading) -> str:
    if isinstance(reading, AttentionReading):
        seen, total = reading.samples_seen, reading.samples_total
    elif isinstance(reading, AlignmentReading):
        seen = total = reading.rows
    else:
        seen, total = reading.rows_seen, reading.rows_total
    return f"{total:,}" if seen == total else f"{seen:,} of {total:,}"
