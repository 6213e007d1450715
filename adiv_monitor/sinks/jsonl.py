"""Reports as JSON lines: one object per line."""

import json
import os
import warnings
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from adiv_monitor.files import file_path
from adiv_monitor.report import StepReport
from adiv_monitor.report.plain import strict

_LINE_START = b'{"step": '  # StepReport.to_dict() starts with the step


class JsonlSink:
    """Writes one line of strict JSON per report.

    JSON has no numbers that are not finite: NaN ("no direction") becomes `null`, infinities become
    the strings `"Infinity"` and `"-Infinity"`. Measures that were not taken are absent. Every line
    is handed to the operating system before `write` returns, so a killed run keeps all its complete
    lines. The file is opened with the first report, so of several ranks only the one that writes
    touches it.

    Args:
        path: the file. Missing folders are made. An existing file is continued, as a resumed run
            needs. What follows the last complete line, as a killed run leaves it, goes into a file
            beside it (`run.jsonl.torn-1`), with a warning.

    Raises:
        ValueError: the file ends in the middle of a line that this sink has not begun.
        TypeError, IsADirectoryError: the path is not a path, or that of a folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = file_path("JsonlSink", path)
        self._file: BinaryIO | None = None
        self._closed = False
        _torn(self._path)

    def write(self, report: StepReport) -> None:
        """Append the report as one line.

        Raises:
            ValueError: the sink is closed.
        """
        if self._closed:
            raise ValueError(f"{self._path}: got a report after close(), expected none")
        if self._file is None:
            self._file = _continued(self._path)
        plain = strict(report.to_dict(), nan=None)
        line = json.dumps(plain, allow_nan=False, ensure_ascii=False)
        # JSON uses the same escapes for lone surrogates.
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open file; another process opens the file itself."""
        return {**self.__dict__, "_file": None}


def _continued(path: Path) -> BinaryIO:
    """Open the file for appending after its last whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = _torn(path)
    if not torn:
        return path.open("ab")
    names = (path.with_name(f"{path.name}.torn-{i}") for i in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    with aside.open("xb") as kept:
        kept.write(torn)
    os.truncate(path, path.stat().st_size - len(torn))
    warnings.warn(
        f"{path}: its last {len(torn):,} bytes are not a complete line: the run that wrote them "
        f"was killed. They were moved to {aside}",
        stacklevel=2,
    )
    return path.open("ab")


def _torn(path: Path) -> bytes:
    """Return the bytes after the last whole line: a killed run leaves the beginning of a line."""
    if not path.is_file():  # a pipe or a device has no last line
        return b""
    last = b""
    with path.open("rb") as file:
        for line in file:
            last = line
    if not last.endswith(b"\n") and last[: len(_LINE_START)] != _LINE_START[: len(last)]:
        raise ValueError(
            f"{path}: got a file that ends in the unfinished line {last[:40]!r}; expected lines "
            'that begin with {"step": …. Give the sink a file of its own.'
        )
    return b"" if last.endswith(b"\n") else last
