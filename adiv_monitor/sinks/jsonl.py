"""Reports as JSON lines: one object per line, readable by anything."""

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from adiv_monitor.report import StepReport

_LINE_START = b'{"step": '  # StepReport.to_dict() begins with the step


class JsonlSink:
    """Writes one line of strict JSON per report.

    JSON has no word for numbers that are not finite: NaN ("no direction") becomes `null`,
    infinities become the strings `"Infinity"` and `"-Infinity"`. Measures that were not taken are
    absent. Every line is with the operating system when `write` returns, so a killed run leaves all
    its finished lines behind.

    Args:
        path: the file; missing folders are made. An existing file is continued, which is what a
            resumed run wants. A last line that a killed run left unfinished is removed.

    Raises:
        ValueError: when the file ends in the middle of a line that this sink has not begun.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_unfinished_line(path)
        self._file = path.open("ab")

    def write(self, report: StepReport) -> None:
        """Append the report as one line."""
        line = json.dumps(_strict(report.to_dict()), allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _strict(value: Any) -> Any:
    """The same nested data with every float that JSON lacks replaced."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _drop_unfinished_line(path: Path) -> None:
    with path.open("rb") as file:
        last = b"".join(deque(file, maxlen=1))
    if not last or last.endswith(b"\n"):
        return
    if last[: len(_LINE_START)] != _LINE_START[: len(last)]:
        raise ValueError(
            f"{path}: got a file that ends in the unfinished line {last[:40]!r}; expected lines "
            'that begin with {"step": …. Give the sink a file of its own.'
        )
    os.truncate(path, path.stat().st_size - len(last))
