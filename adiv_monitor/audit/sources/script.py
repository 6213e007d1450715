"""Watches the user's code while it is loaded, so that no script trains by accident."""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adiv_monitor.audit.options.usage import UsageError, place

_INSTEAD = (
    'while the audit only loads your code: put what trains below `if __name__ == "__main__":`, '
    "or give --run-script to let it run"
)


class _Refused(BaseException):
    """Ends the user's code, past any `except Exception` in it."""


class Ran:
    """The optimizer steps that the user's code took while it was loaded."""

    def __init__(self) -> None:
        self._steps: Counter[Optimizer] = Counter()

    def count(self, optimizer: Optimizer) -> None:
        """Count a step of the optimizer."""
        self._steps[optimizer] += 1

    def steps_of(self, model: nn.Module, *, copied: bool) -> int:
        """Return the number of steps that trained the model.

        Args:
            model: the model.
            copied: whether it is a copy of one that the code holds. It may then be one of an
                average of weights or of the best ones, so that the steps of any optimizer count;
                else those of an optimizer that holds its parameters.
        """
        own = set(map(id, model.parameters()))
        return max(
            (
                steps
                for optimizer, steps in self._steps.items()
                if copied or any(id(p) in own for g in optimizer.param_groups for p in g["params"])
            ),
            default=0,
        )


@contextmanager
def watched(*, may_train: bool) -> Iterator[Ran]:
    """Watch the user's code in a block: the first step of an optimizer ends it.

    So does the first call of `torch.save` or safetensors that would write over an existing file of
    the working folder. Files that other functions write are not watched.

    Args:
        may_train: whether the code may do both.

    Raises:
        UsageError: the code did so; it names the line.
    """
    ran, refused, folder = Ran(), [], Path.cwd()

    def refuse(what: str) -> None:
        if not may_train:
            refused.append(f"{place(traceback.extract_stack()) or 'your code'} {what} {_INSTEAD}")
            raise _Refused

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ran.count(optimizer)
        refuse("takes an optimizer step")

    def write(file: object) -> None:
        if isinstance(file, (str, os.PathLike)):
            path = Path(file).resolve()
            if path.is_file() and path.is_relative_to(folder):
                refuse(f"writes over {path.relative_to(folder)}")

    try:
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(step).remove)
            stack.enter_context(_before(torch, "save", write))
            for name in ("safetensors.torch", "safetensors.numpy"):
                with suppress(ImportError):  # then nothing is written with it
                    stack.enter_context(_before(import_module(name), "save_file", write))
            yield ran
    except BaseException as error:  # the code may have caught the refusal and failed by it
        if refused:
            raise UsageError(refused[0]) from error
        raise
    if refused:
        raise UsageError(refused[0])


@contextmanager
def _before(module: Any, name: str, look: Callable[[object], None]) -> Iterator[None]:
    """Show the second argument of each call of the module's function, a file, to `look`."""
    function, is_on = getattr(module, name), [True]

    @wraps(function)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if is_on:  # code that has imported this function keeps it
            look(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")))
        return function(*args, **kwargs)

    setattr(module, name, looked_at)
    try:
        yield
    finally:
        is_on.clear()
        setattr(module, name, function)
