"""The output of an audit in the terminal: progress, verdict, findings and a table."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

from adiv_monitor.audit.report import AuditReport
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.pages.report_page import introduced
from adiv_monitor.printable import printable, quoted
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import listed
from adiv_monitor.sinks.table import TableSink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

CLOSED_PIPE = 141  # 128 + SIGPIPE
_MOST_LAYERS = 16  # in the table, so that the verdict stays on the screen
_COLOURS = {"act": "bold red", "watch": "yellow", "note": "blue"}


P = ParamSpec("P")


def quiet_when_unread(main: Callable[P, int]) -> Callable[P, int]:
    """Make a command end with no traceback if its output is no longer read.

    In `adiv-audit --help | head -3`, for example, `head` closes the pipe. The exit code is that of
    programs that a closed pipe ends.
    """

    @wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # Python flushes again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE

    return command


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


def console() -> "Console":
    """Return a console that leaves it to `quiet_when_unread` to end the program."""
    from rich.console import Console

    class Own(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # Console would exit with code 1

    return Own(highlight=False, soft_wrap=False)


def show(report: AuditReport, console: "Console", model: str = "") -> None:
    """Print what was audited, verdict, findings, the last measured step as a table, and notes.

    Args:
        report: the report.
        console: where to print.
        model: the name by which the user calls the model.
    """
    from rich.text import Text

    print(printable(introduced(report.record, model)), file=console.file)
    console.print(Text(printable(report.verdict), "bold"))
    for finding in report.findings:
        console.print()
        for line in _lines(finding):
            console.print(line)
    if report.record.reports:
        console.print()
        last, left_out = _shortened(report.record.reports[-1], report)
        TableSink(file=console.file).write(last)
        if left_out:
            console.print(Text(f"{left_out:,} more layers are in report.html"))
    if report.hurried:
        console.print(Text("note: with more time (--try-seconds), the audit tries more fixes"))
    for note in report.record.notes:
        console.print(Text(printable(f"note: {note}")))


def _lines(finding: Finding) -> "list[object]":
    from rich.padding import Padding
    from rich.text import Text

    where = f" · {listed([quoted(path) for path in finding.layers])}" if finding.layers else ""
    head = Text.assemble(
        (f"{finding.strength:5}", _COLOURS[finding.strength]), printable(f"  {finding.name}{where}")
    )
    told = [finding.summary] if finding.summary else []
    told += [f"{advice.outcome.mark} {advice}" for advice in finding.advice]
    told += [f"no fix: {finding.not_advised}"] if finding.not_advised else []
    return [head, *(Padding(Text(printable(line)), (0, 0, 0, 7), expand=False) for line in told)]


def _shortened(step: StepReport, report: AuditReport) -> tuple[StepReport, int]:
    """Return the step with at most 16 layers, those of findings first, and the number left out."""
    if len(step.layers) <= _MOST_LAYERS:
        return step, 0
    named = [layer for finding in report.findings for layer in finding.layers]
    order = dict.fromkeys([*named, *step.layers])
    chosen = set([layer for layer in order if layer in step.layers][:_MOST_LAYERS])
    layers = {path: reading for path, reading in step.layers.items() if path in chosen}
    return replace(step, layers=layers), len(step.layers) - len(layers)
