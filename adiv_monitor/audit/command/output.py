"""The folder of a report, which is written as a whole or not at all."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adiv_monitor.audit.options.config import Config, dumped
from adiv_monitor.audit.options.usage import UsageError
from adiv_monitor.audit.report import AuditReport
from adiv_monitor.files import keep_mode, write_whole
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
_HEAD = 2000  # length of the beginning that is searched for marks
_BOARD = "tensorboard"
_BOARD_MARK = ".adiv-audit"  # suffix of file names


def check(out: str, *, force: bool = False) -> None:
    """Raise UsageError if a report must not, or can't, be written to `out`.

    The check leaves nothing behind.

    Args:
        out: The folder.
        force: Whether files that no audit wrote may be overwritten.
    """
    folder = Path(out).absolute()
    try:
        _check_names(folder, out, force)
    except OSError as error:
        raise _unwritable(out, error) from error
    _staging(folder, out).rmdir()


@contextmanager
def staged(out: str) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `out` at the end, unless an error occurs.

    It lies in `out` or in the nearest folder above it that exists. Files of the same names are
    replaced, and so are an earlier audit's files for TensorBoard; all others stay. Missing folders
    are made.

    Raises:
        UsageError: `out` can't be written to.
    """
    folder = Path(out).absolute()
    stage = _staging(folder, out)
    try:
        yield stage
        _move(stage, folder)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _staging(folder: Path, out: str) -> Path:
    # Files can't be moved between file systems, and an existing folder may be on a file system of
    # its own.
    above = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=above))
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: str, error: OSError) -> UsageError:
    return UsageError(f"--out {out}: can't be written to: {error.strerror or error}")


def _check_names(folder: Path, out: str, force: bool) -> None:
    found = [folder / name for name in _MARKS if os.path.lexists(folder / name)]
    board = folder / _BOARD
    for path in found:
        if path.is_dir() or not (path.is_file() or path.is_symlink()):
            raise UsageError(f"--out {out}: {path.name} is no regular file")
    if os.path.lexists(board) and (board.is_symlink() or not board.is_dir()):
        raise UsageError(f"--out {out}: {_BOARD} is no folder")
    foreign = [path for path in found if not _is_ours(path)]
    if board.is_dir():
        foreign += [path for path in sorted(board.iterdir()) if not _is_ours(path)]
    if foreign and not force:
        names = ", ".join(str(path.relative_to(folder)) for path in foreign[:3])
        more = f" and {len(foreign) - 3:,} more files" if len(foreign) > 3 else ""
        raise UsageError(
            f"--out {out}: holds {names}{more}, which no audit wrote; give another folder, or "
            "--force to overwrite what has the names of the audit's files; nothing else is removed"
        )


def _is_ours(path: Path) -> bool:
    """Return whether an audit wrote this file."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.parent.name == _BOARD:
        return path.name.endswith(_BOARD_MARK)
    with path.open("rb") as file:
        return _MARKS[path.name].search(file.read(_HEAD)) is not None


def _is_comparison(path: Path) -> bool:
    """Return whether `adiv-audit compare` wrote this file."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return _COMPARED.search(file.read(_HEAD)) is not None
    except OSError:
        return False


def _move(stage: Path, folder: Path) -> None:
    """Move each file into its place and remove the files of an earlier audit for TensorBoard."""
    board = folder / _BOARD
    earlier = [path for path in board.iterdir() if _is_ours(path)] if board.is_dir() else []
    board.mkdir(parents=True, exist_ok=True)
    for made in sorted(path for path in stage.rglob("*") if path.is_file()):
        path = folder / made.relative_to(stage)
        keep_mode(made, path)
        made.replace(path)
    for path in earlier:
        path.unlink()


def write(report: AuditReport, config: Config, folder: Path) -> None:
    """Write the report's files, config.yaml, and tensorboard/ with every measured step."""
    from torch.utils.tensorboard import SummaryWriter

    report.write(folder)
    write_whole({folder / "config.yaml": _CONFIG_HEAD + dumped(config)})
    with SummaryWriter(folder / _BOARD, filename_suffix=_BOARD_MARK) as writer:
        sink = TensorBoardSink(writer)
        for step in report.record.reports:
            sink.write(step)
        sink.close()


def write_page(file: str, text: str, *, force: bool = False) -> None:
    """Write a page of a comparison.

    Args:
        file: The page's name.
        text: Its content.
        force: Whether a file that is no such page may be overwritten.

    Raises:
        UsageError: The page can't be written, or would overwrite another file.
    """
    path = Path(file)
    if os.path.lexists(path) and not force and not _is_comparison(path):
        raise UsageError(
            f"--out {file}: this file was not written by compare; choose another name, or pass "
            "--force to overwrite it"
        )
    try:
        write_whole({Path(file): text})
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {file}: can't be written: {reason}") from error
