"""A report as a table in the terminal."""

import io
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import chain, zip_longest
from typing import IO, TYPE_CHECKING, NamedTuple

from adiv_monitor.diagnosis.health import worst_layers
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
from adiv_monitor.sinks.scalars import known_measures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Drawn

_ENDLESS = 10_000  # characters
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
            _print(report, self._measures, self._console, self._said)
        except OSError:  # the disk is full or the pipe closed: drop the text that is still buffered
            self._console = _console(self._file)
            raise

    def close(self) -> None:
        """Do nothing: the file belongs to the caller who opened it."""


def table_text(report: StepReport, width: int | None = None) -> str:
    """Return the text that `print` shows for a report: that of a `TableSink`, without colours.

    It is as wide as the terminal, or as `width` says, with a limited number of layers.
    """
    from rich.console import Console

    text = io.StringIO()
    width = width or _console(None).width
    console = Console(
        file=text, width=width, color_system=None, force_jupyter=False, highlight=False
    )
    _print(report, TABLE_MEASURES, console, set(), MOST_ROWS, MOST_LINES)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table_html(report: StepReport) -> str:
    """Return the text of `print` for notebooks, which scrolls sideways; worst values are bold."""
    text = escape(table_text(report, _ENDLESS))
    bold = re.sub(r"\S+\*(?=\s)", r"<b>\g<0></b>", text)
    return f'<pre style="overflow-x:auto">{bold}</pre>'


def _print(
    report: StepReport,
    measures: Iterable[str],
    console: "Console",
    said: set[str],
    rows: int | None = None,
    lines: int | None = None,
) -> None:
    """Print a report without legends and reasons in `said`, and add its own to `said`."""
    from rich.text import Text

    def say(words: Iterable[str]) -> None:
        for line in words:
            if line:
                console.print(Text(printable(line)))

    def say_once(words: Iterable[str]) -> None:
        new = [line for line in words if line not in said]
        say(new)
        said.update(new)

    say([_head(report)])
    found = _of_kinds(report, measures, rows)
    for table in found:
        for drawn in _tables(table, console):
            console.print(drawn)
        say([table.more])
    say_once(_legend(found))
    say([_realised_words(report)])
    say_once(f"not measured: {line}" for line in not_measured(report))
    say([*_some(report.alarms, "alarm", lines), *_some(report.notes, "note", lines)])


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
        drawn = _drawn(table, range(first, end))
        while end > first + 1 and console.measure(drawn, options=unbounded).maximum > console.width:
            end -= 1
            drawn = _drawn(table, range(first, end))
        yield drawn
        first = end


def _drawn(table: Table, shown: range) -> "Drawn":
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column(f"\n{table.titles[0]}", overflow="fold")
    drawn.add_column(f"\n{table.titles[1]}", justify="right", no_wrap=True)
    columns = []
    for i in shown:
        titles = [f"{word} " for word in table.measures[i].rsplit("_", 1)]
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


def _of_kinds(report: StepReport, measures: Iterable[str], rows: int | None) -> tuple[Table, ...]:
    """Return a table for each kind of measures that was taken.

    Args:
        report: the report to show.
        measures: measures to show as columns.
        rows: most rows of each table; None: all.
    """
    columns = taken(report, measures)
    of_kinds = [tuple(measure for measure in columns if measure in kind) for kind in _KINDS]
    return tuple(_table(report, of_kind, rows) for of_kind in of_kinds if of_kind)


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
    """Return the change of the loss and that expected of the batch; "" if they are not known."""
    if report.realised_loss_change is None or report.descent is None:
        return ""
    real, expected = number(report.realised_loss_change), number(-report.descent)
    return f"the probe's loss changed by {real}; the batch's was to change by {expected}"


def _legend(found: Iterable[Table]) -> Iterator[str]:
    """Yield the meanings of the marks in the tables."""
    cells = [text for table in found for row in table.rows for text in row.cells]
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
