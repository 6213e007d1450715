"""Errors of usage, each reported to the user in one line."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from adiv_monitor.audit.training.target_loss import LossError

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
    where = place(traceback.extract_tb(error.__traceback__))
    at = f" ({where})" if where else ""
    return f"{type(error).__name__}: {one_line(error)}{at}"


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Run foreign code; tell an exception of it in one line that begins with `what`.

    Raises:
        UsageError: The code raised an exception.
    """
    try:
        yield
    except (UsageError, LossError):
        raise
    except Exception as error:
        raise UsageError(f"{what}: {said(error)}") from error


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the file and line of the innermost frame of the user's own code; "": there is none."""
    own = [f for f in frames if is_users(f.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def is_users(file: str) -> bool:
    """Return whether a file is the user's own: not of Python, this or an installed package."""
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
        missing = error.name or module
        raise UsageError(f"{what} needs the package {missing}: pip install {install}") from error
