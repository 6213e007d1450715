"""What the command prints, and its files, which replace those of an earlier audit and no others."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import IO, Any

from adiv_monitor.audit.command.code import UsageError
from adiv_monitor.audit.command.options import Config, dumped
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.audit.training.train import Progress
from adiv_monitor.files import write_whole
from adiv_monitor.pages.digest import MARK
from adiv_monitor.pages.report_page import introduced
from adiv_monitor.printable import printable, quoted
from adiv_monitor.report.wording import listed
from adiv_monitor.sinks.tensorboard import TensorBoardSink

# Styles of a terminal.
_BOLD, _COLOURS = "1", {"act": "1;31", "watch": "33", "note": "34"}
_CONFIG_HEAD = "# Written by adiv-audit, which replaces it when it writes here again.\n"
# A pattern at the beginning of each file that an audit writes, which no other file of that name
# has.
_MARKS = {
    "config.yaml": re.compile(re.escape(_CONFIG_HEAD.encode())),
    "report.html": re.compile(b'<meta name="generator" content="adiv-audit">'),
    "report.json": re.compile(rb'\A\{"schema":\d+,"verdict":'),
    "report.md": re.compile(rb"\A" + re.escape(MARK.encode())),
}
_BOARD = "tensorboard"
_BOARD_MARK = ".adiv-audit"  # suffix of file names


@contextmanager
def progress() -> Iterator[Progress]:
    """Show a bar for each part of the audit in a block, if the output of errors is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    errors, tasks = Console(stderr=True), dict[str, Any]()
    with Bars(console=errors, transient=True, disable=not errors.is_terminal) as bars:

        def update(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)

        yield update


def show(report: AuditReport, file: IO[str], model: str = "", width: int | None = None) -> None:
    """Print what was audited, the verdict, findings and notes.

    Args:
        report: the report.
        file: where to print; in colours if it is a terminal.
        model: the name by which the user calls the model.
        width: most characters of a line; None: those of the terminal.
    """
    is_coloured = file.isatty() and "NO_COLOR" not in os.environ
    width = width or get_terminal_size().columns

    def tell(head: str, text: str, style: str = "") -> None:
        """Print a text, wrapped to the right of its head, which has the style; "": all has it."""
        hang = " " * len(head)
        told = fill(head + printable(text), width, subsequent_indent=hang, break_on_hyphens=False)
        if style and is_coloured:
            end = len(head) or len(told)
            told = f"\033[{style}m{told[:end]}\033[0m{told[end:]}"
        print(told, file=file)

    print(printable(introduced(report.record, model)), file=file)
    tell("", report.verdict, _BOLD)
    for finding in report.findings:
        at = f" · {listed([quoted(path) for path in finding.layers])}" if finding.layers else ""
        print(file=file)
        tell(f"{finding.strength:5}  ", f"{finding.name}{at}", _COLOURS[finding.strength])
        said = [f"{advice.outcome.mark} {advice}" for advice in finding.advice]
        not_advised = finding.not_advised and f"no fix: {finding.not_advised}"
        for line in filter(None, (finding.summary, *said, not_advised)):
            tell(" " * 7, line)
    if report.record.notes:
        print(file=file)
    for note in report.record.notes:
        tell("note: ", note)


def check(out: str, *, force: bool = False) -> None:
    """Raise UsageError if a report must not, or can't, be written to `out`; leave nothing behind.

    Args:
        out: The folder.
        force: Whether files that no audit wrote may be overwritten.
    """
    folder = Path(out).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: can't be written to: {above} is no folder that may change")
    board = folder / _BOARD
    foreign = [folder / x for x, mark in _MARKS.items() if _is_foreign(folder / x, mark)]
    if os.path.lexists(board) and (board.is_symlink() or not board.is_dir()):
        foreign.append(board)
    foreign += {*board.glob("*")}.difference(board.glob(f"*{_BOARD_MARK}"))
    if foreign and not force:
        names = ", ".join(str(path.relative_to(folder)) for path in sorted(foreign))
        raise UsageError(
            f"--out {out}: holds {names}, which no audit wrote; give another folder, or --force "
            "to overwrite what has the names of the audit's files"
        )


def _is_foreign(path: Path, mark: re.Pattern[bytes]) -> bool:
    """Return whether something else than a file that begins with the mark is there."""
    if path.is_symlink() or not path.is_file():
        return os.path.lexists(path)
    with path.open("rb") as file:
        return mark.search(file.read(2000)) is None


def write(report: AuditReport, config: Config) -> None:
    """Write the report's files, config.yaml, and tensorboard/ with every measured step.

    They replace files of the same names and an earlier audit's files for TensorBoard; all others
    stay. Missing folders are made.

    Raises:
        OSError: They can't be written.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.out)
    earlier = [*(folder / _BOARD).glob(f"*{_BOARD_MARK}")]
    report.write(folder)
    write_whole({folder / "config.yaml": _CONFIG_HEAD + dumped(config)})
    with SummaryWriter(folder / _BOARD, filename_suffix=_BOARD_MARK) as writer:
        sink = TensorBoardSink(writer)
        for step in report.record.reports:
            sink.write(step)
        sink.close()
    for path in earlier:
        path.unlink()
