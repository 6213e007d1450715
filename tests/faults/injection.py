"""Raises an exception where a function of the monitor's begins: every function is a boundary."""

import math
import sys
from collections import Counter
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


class Instruction(NamedTuple):
    """A byte code that the monitor executes.

    Attributes:
        code: of which function.
        offset: its place in there.
        frame: how often the function was called before.
        number: how many byte codes that frame has executed before.
    """

    code: CodeType
    offset: int
    frame: int
    number: int

    @property
    def file(self) -> str:
        """Inside the package."""
        return self.code.co_filename[len(_HOME) + 1 :]

    def __str__(self) -> str:
        return f"{self.file}:{self.code.co_qualname}, byte {self.offset}"


class Executed:
    """While it is open, every byte code of the monitor's is noted that is executed.

    Args:
        calls: of each function these first ones, or all.

    Attributes:
        instructions: in the order in which their functions were called.
    """

    def __init__(self, calls: float = math.inf) -> None:
        self._most = calls
        self._frames: list[tuple[CodeType, int, list[int]]] = []
        self._calls: Counter[CodeType] = Counter()

    @property
    def instructions(self) -> list[Instruction]:
        return [
            Instruction(code, offset, frame, number)
            for code, frame, offsets in self._frames
            for number, offset in enumerate(offsets)
        ]

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_HOME):
            return None
        offsets: list[int] = []
        call = self._calls[frame.f_code]
        self._calls[frame.f_code] += 1
        if call >= self._most:
            return None
        self._frames.append((frame.f_code, call, offsets))
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                offsets.append(frame.f_lasti)
            return trace

        return trace


class Interrupting:
    """While it is open, the keyboard interrupts before a byte code of the monitor's.

    Attributes:
        raised: whether that was reached.
    """

    def __init__(self, at: Instruction) -> None:
        self.raised = False
        self._at = at
        self._calls = 0
        self._left = at.number

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not self._at.code:
            return None
        self._calls += 1
        if self._calls != self._at.frame + 1:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                assert frame.f_lasti == self._at.offset
                self.raised = True
                raise KeyboardInterrupt
        return self._in_frame
