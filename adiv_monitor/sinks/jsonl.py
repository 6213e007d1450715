"""Reports as JSON lines: one object per line, readable by anything."""

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from adiv_monitor.files import file_path
from adiv_monitor.report import StepReport

_LINE_START = b'{"step": '  # StepReport.to_dict() begins with the step


class JsonlSink:
    """Writes one line of strict JSON per report.

    JSON has no word for numbers that are not finite: NaN ("no direction") becomes `null`,
    infinities become the strings `"Infinity"` and `"-Infinity"`. Measures that were not taken are
    absent. Every line is with the operating system when `write` returns, so a killed run leaves all
    its finished lines behind. The file is opened with the first report: of the processes of a
    training, each of which has a sink of its own or a copy of one, only the one that writes touches
    it.

    Args:
        path: the file; missing folders are made. An existing file is continued, which is what a
            resumed run wants. A last line that a killed run left unfinished is removed.

    Raises:
        ValueError: when the file ends in the middle of a line that this sink has not begun.
        TypeError, IsADirectoryError: the path is none, or that of a folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = file_path("JsonlSink", path)
        self._file: BinaryIO | None = None
        self._closed = False
        _unfinished(self._path)

    def write(self, report: StepReport) -> None:
        """Append the report as one line.

        Raises:
            ValueError: the sink is closed.
        """
        if self._closed:
            raise ValueError(f"{self._path}: got a report after close(), expected none")
        if self._file is None:
            self._file = _continued(self._path)
        line = json.dumps(_strict(report.to_dict()), allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the file itself."""
        return {**self.__dict__, "_file": None}


def _strict(value: Any) -> Any:
    """The same nested data with every float that JSON lacks replaced."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _continued(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if unfinished := _unfinished(path):
        os.truncate(path, path.stat().st_size - unfinished)
    return path.open("ab")


def _unfinished(path: Path) -> int:
    """Length in bytes of the last line, if it has no end."""
    if not path.is_file():  # a pipe or a device has no last line
        return 0
    with path.open("rb") as file:
        last = b"".join(deque(file, maxlen=1))
    if last.endswith(b"\n"):
        return 0
    if last[: len(_LINE_START)] != _LINE_START[: len(last)]:
        raise ValueError(
            f"{path}: got a file that ends in the unfinished line {last[:40]!r}; expected lines "
            'that begin with {"step": …. Give the sink a file of its own.'
        )
    return len(last)
