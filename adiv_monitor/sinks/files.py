"""Where sinks write: a path that is one of a file, or an error that says so."""

import os
from pathlib import Path


def file_path(sink: str, path: object) -> Path:
    """The path of the file that a sink is to write.

    Raises:
        TypeError: it is no path.
        IsADirectoryError: it is a folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{sink}(path=…): got {path!r}, expected the path of a file")
    found = Path(path)
    if found.is_dir():
        raise IsADirectoryError(f"{sink}(path=…): got the folder {path}, expected a file")
    return found
