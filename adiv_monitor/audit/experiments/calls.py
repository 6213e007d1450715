"""The torch functions that a forward pass and its loss call, in order, each with its place."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Loss, seeded

# Folders whose frames are skipped when the caller's line is searched: torch's and this package's.
_BETWEEN = tuple(f"{p}{os.sep}" for p in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        number: Position in the order of one pass, from 0.
        name: Name of the function, without the trailing underscore of in-place functions.
        path: Path of the innermost running module; None: no module runs, as in the loss.
        args: The positional arguments.
        kwargs: The keyword arguments.
        result: The result.
        function: The function.
        line: File and line of the calling code; "": unknown.
    """

    number: int
    name: str
    path: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    function: Callable[..., Any]
    line: str = ""

    @property
    def place(self) -> str:
        """The place in words: the function, the module that it runs in, and its line."""
        where = f" in '{self.path}'" if self.path else ""
        return f"{self.name}{where}" + (f" ({self.line})" if self.line else "")

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position, or by its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def see_calls(
    fork: Fork,
    see: Callable[[Call], None],
    batch: Any = None,
    change: Callable[[Call], Any] | None = None,
) -> Tensor:
    """Run a fork's loss of a batch and report every call.

    Args:
        fork: A copy, whose buffers may change.
        see: Function that is called with each call after it has returned.
        batch: The batch; None: the fork's first.
        change: As for `change_calls`, in this pass alone; None: nothing changes.

    Returns:
        The loss.
    """
    batch = copied(fork.batches[0] if batch is None else batch)
    with seeded(fork.seed):
        return watched(fork.loss, see, change)(fork.model, batch)


def change_calls(fork: Fork, change: Callable[[Call], Any]) -> None:
    """Replace the results of some functions that a fork's loss calls, from now on.

    Args:
        fork: A copy to train.
        change: Function from a call, whose `result` is `NotImplemented`, to the new result; if it
            returns `NotImplemented`, the function runs as usual.
    """
    fork.loss = watched(fork.loss, change=change)


def watched(
    loss: Loss,
    see: Callable[[Call], None] | None = None,
    change: Callable[[Call], Any] | None = None,
) -> Loss:
    """Return the loss with its calls reported, as by `see_calls`, or changed."""

    def run(model: nn.Module, batch: Any) -> Tensor:
        with Watched(model, see, change):
            return loss(model, batch)

    return run


@torch.no_grad()
def calls_of(fork: Fork, is_met: Callable[[Call], object], batch: Any = None) -> list[Call]:
    """Return the calls of a fork's loss that meet a condition; no graph is kept."""
    found: list[Call] = []
    see_calls(fork, lambda call: found.append(call) if is_met(call) else None, batch)
    return found


class Watched(TorchFunctionMode):
    """Reports each function that is called inside the context, and its place.

    `see` gets each call after it has returned, and `change` before it runs, as in `change_calls`.
    """

    def __init__(
        self,
        model: nn.Module,
        see: Callable[[Call], None] | None = None,
        change: Callable[[Call], Any] | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._see = see
        self._change = change
        self._within: list[str] = []
        self._number = 0
        self._hooks = ExitStack()

    def __enter__(self) -> "Watched":
        for path, module in self._model.named_modules():
            for handle in (
                module.register_forward_pre_hook(lambda *_, path=path: self._within.append(path)),
                module.register_forward_hook(self._leave, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._within.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        path = self._within[-1] if self._within else None
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.rstrip("_")
        call = Call(self._number, name, path, args, kwargs, NotImplemented, func)
        self._number += 1
        result = self._change(call) if self._change is not None else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if self._see is not None:
            self._see(call._replace(result=result, line=_line()))
        return result


def _line() -> str:
    """Return file and line of the innermost caller outside torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_callers(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@cache
def _is_callers(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(_BETWEEN)
