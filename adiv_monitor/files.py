"""Checks of output paths, and writing files atomically."""

import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path


def file_path(sink: str, path: object) -> Path:
    """Check the path of a sink's output file and return it.

    Raises:
        TypeError: the argument is not a path.
        IsADirectoryError: the path is a folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{sink}(path=…): got {path!r}, expected the path of a file")
    found = Path(path)
    if found.is_dir():
        raise IsADirectoryError(f"{sink}(path=…): got the folder {path}, expected a file")
    return found


def needs(user: str, packages: Sequence[str], install: str = '"adiv-monitor[audit]"') -> None:
    """Raise ImportError if one of the packages is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ImportError(f"{user} needs {' and '.join(missing)}: pip install {install}")


def write_whole(files: Mapping[Path, str | bytes]) -> None:
    """Write all of the files or none; readers see each file either complete or as it was before.

    Each file is first written under a random temporary name, which must not exist yet as a file or
    a link, and then renamed. Text is encoded as UTF-8, with lone surrogates as escapes. Missing
    folders are created. A replaced file keeps its permissions. A link is replaced; its target stays
    as it is.

    Raises:
        OSError: a file can't be written, or there is something else there: a folder, a pipe.
    """
    unfinished: dict[Path, Path] = {}
    try:
        for path, content in files.items():
            if isinstance(content, str):
                content = content.encode("utf-8", "backslashreplace")
            path.parent.mkdir(parents=True, exist_ok=True)
            is_stream = path.is_symlink() and path.is_relative_to("/dev")  # as /dev/stdout
            if is_stream or (path.exists() and not path.is_file()):
                raise OSError(f"got {path}, expected a regular file, or none yet")
            temporary = path.with_name(f".{secrets.token_hex(8)}.unfinished")
            # Mode "x" fails if the name exists, even as a link, as in `tempfile`, whose files
            # nobody else may read.
            with temporary.open("xb") as stream:
                unfinished[temporary] = path
                if path.is_file() and not path.is_symlink():
                    temporary.chmod(stat.S_IMODE(path.stat().st_mode))
                stream.write(content)
        for temporary, path in unfinished.items():
            temporary.replace(path)
    finally:
        for temporary in unfinished:
            temporary.unlink(missing_ok=True)
