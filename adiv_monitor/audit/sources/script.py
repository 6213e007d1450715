"""Watches the user's code while it is loaded, so that no script trains by accident."""

import os
import traceback
from collections import Counter
from collections.abc import Iterator
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
        self.steps: Counter[Optimizer] = Counter()
        self.is_watched = True

    def steps_of(self, model: nn.Module) -> int:
        """Return the number of steps of an optimizer that holds parameters of the model."""
        own = set(map(id, model.parameters()))
        of_it = [
            steps
            for optimizer, steps in self.steps.items()
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        ]
        return max(of_it, default=0)


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
    ran, folder = Ran(), Path.cwd()
    refused: list[str] = []

    def refuse(what: str) -> None:
        if not may_train:
            refused.append(f"{place(traceback.extract_stack()) or 'your code'} {what} {_INSTEAD}")
            raise _Refused

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ran.steps[optimizer] += 1
        refuse("takes an optimizer step")

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        @wraps(function)
        def saves(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            path = Path(file).resolve() if isinstance(file, str | os.PathLike) else None
            # Code that has imported the function keeps this one.
            if ran.is_watched and path and path.is_file() and path.is_relative_to(folder):
                refuse(f"writes over {path.relative_to(folder)}")
            return function(*args, **kwargs)

        setattr(module, name, saves)
        watches.callback(setattr, module, name, function)

    with ExitStack() as watches:
        watches.callback(register_optimizer_step_pre_hook(step).remove)
        watches.callback(setattr, ran, "is_watched", False)
        watch(torch, "save")
        with suppress(ImportError):  # then nothing is written with it
            watch(import_module("safetensors.torch"), "save_file")
        try:
            yield ran
        except BaseException:  # the code may have caught the refusal and failed by it
            if not refused:
                raise
    if refused:
        raise UsageError(refused[0])
