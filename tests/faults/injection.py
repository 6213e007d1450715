"""Raises an exception where a function of the monitor's begins: every function is a boundary."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import adiv_monitor

_HOME = str(Path(adiv_monitor.__file__).parent)


class Boundary(NamedTuple):
    """A function of the monitor's.

    Attributes:
        file: inside the package.
        line: where it begins.
        name: what it is called.
    """

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.name}"


def boundary_of(code: CodeType) -> Boundary | None:
    """The function that runs this code, if it is one of the monitor's."""
    if not code.co_filename.startswith(_HOME):
        return None
    if code.co_name in ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
        return None  # a part of the function around it
    return Boundary(code.co_filename[len(_HOME) + 1 :], code.co_firstlineno, code.co_name)


class Watched:
    """While it is open, the monitor's functions are noted as they are called.

    Attributes:
        boundaries: in the order of their first calls.
    """

    def __init__(self) -> None:
        self.boundaries: list[Boundary] = []
        self._codes: set[CodeType] = set()

    def __enter__(self) -> None:
        self._outside = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._outside)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in self._codes:
            self._codes.add(code)
            boundary = boundary_of(code)
            if boundary is not None:
                self.boundaries.append(boundary)


class Raising(Watched):
    """While it is open, a function raises an error when it is called, once.

    Args:
        error: what is raised.
        at: the function.

    Attributes:
        raised: whether it was called.
    """

    def __init__(self, error: BaseException, at: Boundary) -> None:
        super().__init__()
        self.raised = False
        self._error = error
        self._at = at

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code, at = frame.f_code, self._at
        if code.co_firstlineno == at.line and code.co_name == at.name and boundary_of(code) == at:
            self.raised = True
            # What a trace function raises, the function that is called raises, and tracing ends.
            raise self._error
