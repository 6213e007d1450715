"""The files of a report, which replace those of an earlier audit and no others."""

import os
import re
from pathlib import Path

from adiv_monitor.audit.options.config import Config, dumped
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.files import write_whole
from adiv_monitor.pages.digest import MARK
from adiv_monitor.sinks.tensorboard import TensorBoardSink

_CONFIG_HEAD = "# Written by adiv-audit, which replaces it when it writes here again.\n"
# A pattern at the beginning of each file that an audit writes, which no other file of that name
# has.
_MARKS = {
    "config.yaml": re.compile(re.escape(_CONFIG_HEAD.encode())),
    "report.html": re.compile(b'<meta name="generator" content="adiv-audit">'),
    "report.json": re.compile(rb'\A\{"schema":\d+,"verdict":'),
    "report.md": re.compile(rb"\A" + re.escape(MARK.encode())),
}
_COMPARED = re.compile(b'<meta name="generator" content="adiv-audit compare">')
_BOARD = "tensorboard"
_BOARD_MARK = ".adiv-audit"  # suffix of file names


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
    files, board = [folder / name for name in _MARKS], folder / _BOARD
    foreign = [p for p in files if os.path.lexists(p) and not _is_marked(p, _MARKS[p.name])]
    if os.path.lexists(board) and (board.is_symlink() or not board.is_dir()):
        foreign.append(board)
    foreign += {*board.glob("*")}.difference(board.glob(f"*{_BOARD_MARK}"))
    if foreign and not force:
        names = ", ".join(str(path.relative_to(folder)) for path in sorted(foreign))
        raise UsageError(
            f"--out {out}: holds {names}, which no audit wrote; give another folder, or --force "
            "to overwrite what has the names of the audit's files"
        )


def _is_marked(path: Path, mark: re.Pattern[bytes]) -> bool:
    """Return whether the beginning of a regular file holds the mark."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return mark.search(file.read(2000)) is not None


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


def write_page(file: str, text: str, *, force: bool = False) -> None:
    """Write a page of a comparison.

    Args:
        file: The page's name.
        text: Its content.
        force: Whether a file that is no such page may be overwritten.

    Raises:
        UsageError: The page would overwrite another file.
        OSError: It can't be written.
    """
    path = Path(file)
    if os.path.lexists(path) and not force and not _is_marked(path, _COMPARED):
        raise UsageError(f"--out {file} was not written by compare; --force overwrites it")
    write_whole({path: text})
