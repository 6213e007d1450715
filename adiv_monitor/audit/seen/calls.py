"""Functions of torch that a forward pass and its loss call: each with its place, in order."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Loss, seeded

# Not the caller: of torch, and of this package.
_BETWEEN = tuple(f"{p}{os.sep}" for p in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        number: in the order of one pass, from 0.
        name: of the function, without the underscore of those that write in place.
        path: of the innermost module that runs; None: none, as in the loss.
        args: as they were given.
        kwargs: as they were given.
        result: what came back.
        function: the function.
        line: file and line of the code that called it; "": not known.
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
        """In a sentence: its function, the module that it runs in, and its line."""
        where = f" in '{self.path}'" if self.path else ""
        return f"{self.name}{where}" + (f" ({self.line})" if self.line else "")

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place, or its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def see_calls(fork: Fork, see: Callable[[Call], None], batch: Any = None) -> Tensor:
    """Run a fork's loss of a batch, and tell of every call.

    Args:
        fork: a copy, whose buffers may change.
        see: is told of each call, after it returned.
        batch: None: the fork's first.

    Returns:
        The loss.
    """
    batch = copied(fork.batches[0] if batch is None else batch)
    with seeded(fork.seed), _Watched(fork.model, see):
        return fork.loss(fork.model, batch)


def change_calls(fork: Fork, change: Callable[[Call], Any]) -> None:
    """From now on, some functions that a fork's loss calls give something else.

    Args:
        fork: a copy that is to be trained.
        change: call, whose `result` is `NotImplemented` → what it gives; `NotImplemented`: what it
            would.
    """
    fork.loss = _changed(fork.loss, change)


def _changed(loss: Loss, change: Callable[[Call], Any]) -> Loss:
    def changed(model: nn.Module, batch: Any) -> Tensor:
        with _Watched(model, change=change):
            return loss(model, batch)

    return changed


class _Watched(TorchFunctionMode):
    """Tells of each function that is called within, and where."""

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

    def __enter__(self) -> "_Watched":
        for path, module in self._model.named_modules():
            for handle in (
                module.register_forward_pre_hook(partial(self._enter, path)),
                module.register_forward_hook(self._leave, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._within.append(path)

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
    """File and line of the innermost caller that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_callers(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@cache
def _is_callers(file: str) -> bool:
    return file.endswith(".py") and not file.startswith(_BETWEEN)
