"""Checks of output paths, and writing files atomically."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_DESCRIPTORS = Path("/dev/fd")
_STANDARD = {Path("/dev/stdout"): 1, Path("/dev/stderr"): 2}


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


def write_whole(files: Mapping[Path, str | bytes]) -> None:
    """Write all of the files or none; readers see each file either complete or as it was before.

    Each file is first written under a random temporary name, which must not exist yet as a file or
    a link, and then renamed. Text is encoded as UTF-8, with lone surrogates as escapes. Missing
    folders are created. A replaced file keeps its permissions. A link is replaced; its target stays
    as it is. A path that is not a regular file (a device, a pipe, /dev/stdout) is written directly.

    Raises:
        OSError: a file can't be written, or is a link to something that is not a regular file.
    """
    unfinished: dict[Path, Path] = {}
    try:
        for path, content in files.items():
            if isinstance(content, str):
                content = content.encode("utf-8", "backslashreplace")
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = _stream(path)
            if stream is None:
                temporary = path.with_name(f".{secrets.token_hex(8)}.unfinished")
                # Mode "x" fails if the name exists, even as a link, as in `tempfile`, whose files
                # nobody else may read.
                stream = temporary.open("xb")
                unfinished[temporary] = path
                keep_mode(temporary, path)
            with stream:
                stream.write(content)
        for temporary, path in unfinished.items():
            temporary.replace(path)
    finally:
        for temporary in unfinished:
            temporary.unlink(missing_ok=True)


def keep_mode(made: Path, replaced: Path) -> None:
    """Copy the permissions of the regular file that `made` is to replace, if there is one."""
    if replaced.is_file() and not replaced.is_symlink():
        made.chmod(stat.S_IMODE(replaced.stat().st_mode))


def _stream(path: Path) -> IO[bytes] | None:
    """Open a path that is written directly; return None for a file to be created or replaced."""
    if path.parent.resolve() == _DESCRIPTORS.resolve() and path.name.isdecimal():
        return open(int(path.name), "wb", closefd=False)
    if path in _STANDARD:
        return open(_STANDARD[path], "wb", closefd=False)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISLNK(mode):
        if path.exists() and not path.is_file():
            raise OSError(f"a link that leads to no regular file: {path}")
        return None
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb")
