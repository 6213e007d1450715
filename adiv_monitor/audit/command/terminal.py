"""The output of an audit in the terminal: progress, verdict and findings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.pages.report_page import introduced
from adiv_monitor.printable import printable, quoted
from adiv_monitor.report.wording import listed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_COLOURS = {"act": "bold red", "watch": "yellow", "note": "blue"}


class ProgressBars:
    """One progress bar for each part of the audit on a terminal; elsewhere nothing is shown."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, of: int) -> None:
        """Update the bar of a part of the audit: `done` units `of` all."""
        from rich.markup import escape

        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(escape(printable(what)), total=of)
        self._bars.update(self._tasks[what], completed=done, total=of)


@contextmanager
def progress() -> "Iterator[ProgressBars]":
    """Show progress bars in a block, if the output of errors is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bars:
        yield ProgressBars(bars)


def console() -> "Console":
    """Return a console that leaves it to `main` to end the program."""
    from rich.console import Console

    class Own(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # Console would exit with code 1

    return Own(highlight=False, soft_wrap=False)


def show(report: AuditReport, console: "Console", model: str = "") -> None:
    """Print what was audited, the verdict, findings and notes.

    Args:
        report: the report.
        console: where to print.
        model: the name by which the user calls the model.
    """
    from rich.padding import Padding
    from rich.text import Text

    print(printable(introduced(report.record, model)), file=console.file)
    console.print(Text(printable(report.verdict), "bold"))
    for finding in report.findings:
        at = f" · {listed([quoted(path) for path in finding.layers])}" if finding.layers else ""
        strength = (f"\n{finding.strength:5}", _COLOURS[finding.strength])
        console.print(Text.assemble(strength, printable(f"  {finding.name}{at}")))
        told = [f"{advice.outcome.mark} {advice}" for advice in finding.advice]
        not_advised = finding.not_advised and f"no fix: {finding.not_advised}"
        for line in filter(None, (finding.summary, *told, not_advised)):
            console.print(Padding(Text(printable(line)), (0, 0, 0, 7), expand=False))
    hurried = "with more time (--try-seconds), the audit tries more fixes"
    console.print()
    for note in (*[hurried] * report.hurried, *report.record.notes):
        console.print(Text(printable(f"note: {note}")))
