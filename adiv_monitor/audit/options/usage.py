"""Errors of usage, each reported to the user in one line."""

import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

_LONGEST = 400  # characters
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE = str(Path(__file__).parents[2])


class UsageError(ValueError):
    """Raised for arguments that the command can't use; the message says what to do, in one line."""


def one_line(text: object) -> str:
    """Return the text with runs of white space collapsed, cut after 400 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def said(error: BaseException) -> str:
    """Describe an exception of foreign code in one line: its class, its message, where it arose.

    The place is the innermost stack frame outside installed packages and this package, which is the
    user's own code.
    """
    name = type(error).__name__
    words = one_line(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{name}: {words}{place}" if words else f"{name}{place}"


def _is_users(file: str) -> bool:
    installed = any(part in _INSTALLED for part in Path(file).parts)
    return not (installed or file.startswith((_PACKAGE, "<"))) and "lib/python" not in file


def needed(module: str, what: str, install: str = '"adiv-monitor[audit]"') -> Any:
    """Import a module of an optional package and return it.

    Raises:
        UsageError: The package, which `what` needs, is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            package = f"{package} ({one_line(error)})"
        raise UsageError(f"{what} needs the package {package}: pip install {install}") from error
