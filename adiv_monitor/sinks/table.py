"""A report as a table in the terminal."""

import io
import random
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from adiv_monitor.printable import printable
from adiv_monitor.report import StepReport
from adiv_monitor.sinks.cells import MOST_LINES, MOST_ROWS, TABLE_MEASURES, Shown, Table, shown
from adiv_monitor.sinks.scalars import known_measures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Drawn

_ENDLESS = 10_000  # characters


class TableSink:
    """Prints every report as a table: a row per layer, a column per measure.

    Measures of attention and of alignment have their own tables below.

    Values that are estimated from sampled rows are printed to the digits that their standard errors
    allow: 0.0431 ± 0.012 reads 0.04. "≈0" is a value closer to zero than its error, which has no
    sign; "?" a value whose error is not known; "–" means "no direction", "idle" that none of the
    sampled rows has a gradient, "NaN" not finite, and a blank a measure that was not taken. `*` (in
    colour if the terminal has any) marks the worst value of a measure, if the errors tell which one
    that is (see `StepReport.summary`); of `update_ratio` the lowest and the highest one if they lie
    outside the healthy range. If the terminal is too narrow, the measures are split into several
    tables. The report's alarms and notes follow below, and, when they are new, the meaning of the
    marks and what was not measured.

    Args:
        measures: the columns, by name.
        file: where to print. None: standard output.

    Raises:
        ValueError: there is no measure of that name.
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
            _print(shown(report, self._measures), self._console, self._said)
        except OSError:  # the disk is full or the pipe closed: drop the text that is still buffered
            self._console = _console(self._file)
            raise

    def close(self) -> None:
        """Do nothing: the file belongs to the caller who opened it."""


def table_text(report: StepReport) -> str:
    """Return the text that `print` shows for a report: that of a `TableSink`, without colours.

    It is as wide as the terminal, with a limited number of layers.
    """
    from rich.console import Console

    text = io.StringIO()
    width = _console(None).width
    console = Console(
        file=text, width=width, color_system=None, force_jupyter=False, highlight=False
    )
    _print(shown(report, TABLE_MEASURES, MOST_ROWS, MOST_LINES), console, set())
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _print(found: Shown, console: "Console", said: set[str]) -> None:
    """Print a report without the lines in `said`, and add its own lines to `said`."""
    from rich.text import Text

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            if line:
                console.print(Text(printable(line)))

    def say_once(lines: tuple[str, ...]) -> None:
        say(line for line in lines if line not in said)
        said.update(lines)

    say([found.head])
    for table in found.tables:
        for drawn in _tables(table, console):
            console.print(drawn)
        say([table.more])
    say_once(found.legend)
    say([found.realised])
    say_once(found.not_measured)
    say(found.said)


def _console(file: IO[str] | None) -> "Console":
    state = random.getstate()
    from rich.console import Console

    random.setstate(state)  # the import draws a number

    class Unbroken(Console):
        """A console that raises on a closed pipe, so that the monitor handles it."""

        def on_broken_pipe(self) -> None:
            raise  # rich would end the process here

    # In a notebook, rich would display output that is meant for a file.
    console = Unbroken(file=file, highlight=False, force_jupyter=None if file is None else False)
    if not (console.is_terminal or console.is_jupyter):
        console.width = _ENDLESS  # a file has no limit of line length
    return console


def _tables(table: Table, console: "Console") -> Iterator["Drawn"]:
    """Yield one table if it fits the console, else as few as possible with some measures each."""
    unbounded = console.options.update(width=_ENDLESS)
    first, last = 0, len(table.measures)
    while first < last:
        end = last
        drawn = _drawn(table.columns(first, end))
        while end > first + 1 and console.measure(drawn, options=unbounded).maximum > console.width:
            end -= 1
            drawn = _drawn(table.columns(first, end))
        yield drawn
        first = end


def _drawn(table: Table) -> "Drawn":
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column(f"\n{table.titles[0]}", overflow="fold")
    drawn.add_column(f"\n{table.titles[1]}", justify="right", no_wrap=True)
    columns = []
    for i, measure in enumerate(table.measures):
        titles = [f"{word} " for word in measure.rsplit("_", 1)]
        cells = [_padded(row.cells[i]) for row in table.rows]
        width = max(map(len, [*titles, *cells]))
        # Aligned here: rich would strip the blanks that align decimal points.
        drawn.add_column("\n".join(word.rjust(width) for word in titles), no_wrap=True)
        columns.append([Text(c.rjust(width), "bold red" if "*" in c else "") for c in cells])
    for row, *cells in zip(table.rows, *columns, strict=True):
        drawn.add_row(Text(printable(row.path)), row.seen, *cells)
    return drawn


def _padded(text: str) -> str:
    """Pad with blanks in place of a star, and of decimals up to three."""
    if not text:
        return ""
    value = text.removesuffix("*")
    point, decimals = value.partition(".")[1:]
    fixed = value[-1].isdigit() and "e" not in value
    missing = 4 - len(point + decimals) if fixed else 0
    return text + " " * (value == text) + " " * missing
