"""A report as a table in the terminal."""

import io
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from adiv_monitor.printable import printable
from adiv_monitor.report import ALIGNMENT_MEASURES, ATTENTION_MEASURES, MEASURES, StepReport, taken
from adiv_monitor.report.wording import not_measured
from adiv_monitor.sinks.cells import (
    MOST_LINES,
    MOST_ROWS,
    TABLE_MEASURES,
    cell,
    head,
    legend,
    more_words,
    picked,
    realised_words,
    rows_words,
    some,
    worst_paths,
)
from adiv_monitor.sinks.scalars import known_measures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KINDS = (MEASURES, ATTENTION_MEASURES, ALIGNMENT_MEASURES)  # each has tables of its own
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
            _show(report, self._measures, self._console, self._said)
        except OSError:  # the disk is full, the pipe closed: what waits to be printed is given up
            self._console = _console(self._file)
            raise

    def close(self) -> None:
        """Nothing to finish: the file belongs to whoever opened it."""


def table_text(report: StepReport) -> str:
    """What `print` shows of a report: what a `TableSink` prints, without colours.

    It is as wide as the terminal, and has so many layers at most that it stays readable.
    """
    from rich.console import Console

    text = io.StringIO()
    width = _console(None).width
    console = Console(
        file=text, width=width, color_system=None, force_jupyter=False, highlight=False
    )
    _show(report, TABLE_MEASURES, console, set(), MOST_ROWS, MOST_LINES)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _show(
    report: StepReport,
    measures: Iterable[str],
    console: "Console",
    said: set[str],
    rows: int | None = None,
    lines: int | None = None,
) -> None:
    """Print a report, with so many rows of each table, and lines of each kind, at most.

    Args:
        report: what to print.
        measures: the columns.
        console: where.
        said: lines that are not news any more; those that are printed here are added.
        rows: None: all.
        lines: None: all.
    """
    from rich.text import Text

    def say(found: Iterable[str]) -> None:
        for line in found:
            if line:
                console.print(Text(printable(line)))

    def say_once(found: Iterable[str]) -> None:
        for line in found:
            if line not in said:
                say([line])
                said.add(line)

    say([head(report)])
    shown = taken(report, measures)
    for kind in KINDS:
        if of_kind := tuple(measure for measure in shown if measure in kind):
            for table in _tables(report, of_kind, picked(report, of_kind, rows), console):
                console.print(table)
            say([more_words(report, of_kind, rows)])
    say_once(legend(report, shown))
    say([realised_words(report)])
    say_once(f"not measured: {line}" for line in not_measured(report))
    say(some(report.alarms, "alarm", lines))
    say(some(report.notes, "note", lines))


def _console(file: IO[str] | None) -> "Console":
    from rich.console import Console

    class Unbroken(Console):
        """Leaves it to the monitor what a closed pipe means to the training."""

        def on_broken_pipe(self) -> None:
            raise  # rich would end the process

    # In a notebook rich shows what it is to write to a file.
    console = Unbroken(file=file, highlight=False, force_jupyter=None if file is None else False)
    if not (console.is_terminal or console.is_jupyter):
        console.width = _ENDLESS  # a file is as wide as its lines
    return console


def _tables(
    report: StepReport, measures: tuple[str, ...], paths: list[str], console: "Console"
) -> Iterator["Table"]:
    """One table where it fits the console, else the measures in as few as do."""
    worst = worst_paths(report)
    unbounded = console.options.update(width=_ENDLESS)
    while measures:
        count = len(measures)
        table = _table(report, measures, paths, worst)
        while count > 1 and console.measure(table, options=unbounded).maximum > console.width:
            count -= 1
            table = _table(report, measures[:count], paths, worst)
        yield table
        measures = measures[count:]


def _table(
    report: StepReport,
    measures: tuple[str, ...],
    paths: list[str],
    worst: dict[str, str | None],
) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    readings = {path: report.readings(measures[0])[path] for path in paths}
    attends = measures[0] in ATTENTION_MEASURES
    table.add_column("\nattention" if attends else "\nlayer", overflow="fold")
    table.add_column("\nsamples" if attends else "\nrows", justify="right", no_wrap=True)
    columns = []
    for measure in measures:
        titles = [f"{word} " for word in measure.rsplit("_", 1)]
        cells = [_padded(cell(r, measure, p == worst.get(measure))) for p, r in readings.items()]
        width = max(map(len, [*titles, *cells]))
        # Aligned here: rich would take the blanks off that keep decimal points below each other.
        table.add_column("\n".join(word.rjust(width) for word in titles), no_wrap=True)
        columns.append([Text(c.rjust(width), "bold red" if "*" in c else "") for c in cells])
    for (path, reading), *row in zip(readings.items(), *columns, strict=True):
        table.add_row(Text(printable(path)), rows_words(reading), *row)
    return table


def _padded(text: str) -> str:
    """With blanks for a star, and for the decimals that are missing to three."""
    if not text:
        return ""
    value = text.removesuffix("*")
    point, decimals = value.partition(".")[1:]
    fixed = value[-1].isdigit() and "e" not in value
    missing = 4 - len(point + decimals) if fixed else 0
    return text + " " * (value == text) + " " * missing
