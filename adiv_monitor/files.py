"""Where files are written: paths that are those of files, and files that are whole."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_DESCRIPTORS = Path("/dev/fd")
_STANDARD = {Path("/dev/stdout"): 1, Path("/dev/stderr"): 2}


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


def write_whole(files: Mapping[Path, str | bytes]) -> None:
    """Write files so that each is seen whole, or as it was before; all of them, or none.

    They are written under other names first, which nobody can guess, and only if there is no such
    file or link. Text becomes UTF-8, lone surrogates become escapes. Missing folders are made. A
    file that is replaced keeps its permissions. A link is replaced, and what it leads to stays as
    it is. What is no regular file (a device, a pipe, /dev/stdout) is written to.

    Raises:
        OSError: a file can't be written, or is a link to what is no regular file.
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
                # "x" fails where the name is taken, by a link too, as in `tempfile`, whose files
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
    """Give a file the permissions of the regular file, if there is one, that it is to replace."""
    if replaced.is_file() and not replaced.is_symlink():
        made.chmod(stat.S_IMODE(replaced.stat().st_mode))


def _stream(path: Path) -> IO[bytes] | None:
    """What is written to as it is; None where a file is made, or replaced."""
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
