"""The user's code: imported by its path, watched while it loads, and blamed in one line."""

import os
import pkgutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import ismethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adiv_monitor.audit.training.setup import LossError

_LONGEST = 400  # characters
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE = str(Path(__file__).parents[2])

# The options that a configuration gives ("MODEL", "--loss"). It must not run code of others: of
# what is written elsewhere, it may name what lies below these modules.
OF_FILE: ContextVar[Collection[str]] = ContextVar("OF_FILE", default=())
_SAFE = ("torch.nn.", "torch.optim.", "torchvision.models.")

_BELOW_MAIN = (
    '; what stands below `if __name__ == "__main__":` is not imported. Write three lines above it, '
    "and name them as MODEL, --data and --loss: `def model(): return Net(…)`, `def batches(): "
    "return DataLoader(…)`, `def loss(output, target): return cross_entropy(output, target)`"
)
_INSTEAD = (
    'while the audit only loads your code: put what trains below `if __name__ == "__main__":`, '
    "or give --run-script to let it run"
)


class UsageError(ValueError):
    """Raised for arguments that the command can't use; the message says what to do, in one line."""


def one_line(text: object) -> str:
    """Return the text with runs of white space collapsed, cut after 400 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def said(error: BaseException) -> str:
    """Describe an exception of the user's code in one line: its class, its message, its place."""
    where = place(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {one_line(error)}" + (f" ({where})" if where else "")


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Run the user's code; tell an exception of it in one line that begins with `what`.

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
    own = [f for f in frames if _is_users(f.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _is_users(file: str) -> bool:
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
        raise UsageError(f"{what} needs {error.name or module}: pip install {install}") from error


def close(name: str, known: Iterable[str]) -> str:
    """Return a hint at the names that are like the given one, for the end of an error."""
    matches = get_close_matches(name, [each for each in known if not each.startswith("_")])
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def imported(path: str, option: str, known: Iterable[str] = ()) -> Any:
    """Import the object that `package.module:name`, `package.module.name` or `file.py:name` names.

    Importing a module runs it.

    Args:
        path: The import path; names after a colon may have attributes (`module:Class.method`). A
            file is imported as the module that it is in its package, or as Python imports scripts
            of its folder.
        option: The option that the path belongs to, as errors name it ("MODEL", "--loss").
        known: What else the option may be.

    Raises:
        UsageError: There is no such module or name, importing it raised, or a configuration names
            what it may not.
    """
    where = f"{option} {path}: "
    module, colon, names = path.partition(":")
    is_file = module.endswith(".py")
    if not (colon or is_file):
        module, _, names = path.rpartition(".")
    if not (module and names):
        forms = ", ".join((*known, "package.module:NAME"))
        raise UsageError(f"{where}expected one of {forms} or FILE.py:NAME")
    is_of_file, hint = option in OF_FILE.get(), ""
    if is_of_file and is_file and not Path(module).resolve().is_relative_to(Path.cwd().resolve()):
        raise _refused(path, option, module)
    try:
        found = pkgutil.resolve_name(f"{_module_of(module) if is_file else module}:{names}")
    except Exception as error:
        if isinstance(error, AttributeError):
            file = str(getattr(error.obj, "__file__", ""))
            has_main = file.endswith(".py") and "if __name__ ==" in Path(file).read_text("utf-8")
            hint = _BELOW_MAIN if has_main else close(str(error.name), dir(error.obj))
        elif isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            hint = "; modules are found from the current folder, others by FILE.py:NAME"
        raise UsageError(f"{where}{said(error)}{hint}") from error
    home = str(getattr(found, "__module__", None))
    if is_of_file and not _may_be_of_file(found, home):
        raise _refused(path, option, home)
    return found


def _refused(path: str, option: str, home: str) -> UsageError:
    return UsageError(
        f"--config: {path} is code of {home}, neither below the current folder nor a model, loss "
        f"or optimizer of torch; if you trust it, on the command line: {option} {path}"
    )


def _module_of(file: str) -> str:
    """Return the name by which a file is imported, from a folder that is put on Python's path."""
    whole = Path(file).resolve(strict=True)
    folder, name = whole.parent, whole.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return name


def _may_be_of_file(found: Any, home: str) -> bool:
    # Methods of these modules may load files, as those of torchvision's weights do.
    safe = home.startswith(_SAFE) and not ismethod(found)
    if not callable(found) or isinstance(found, nn.Module) or safe:
        return True
    file = str(getattr(sys.modules.get(home), "__file__", "<none>"))
    return _is_users(file) and Path(file).resolve().is_relative_to(Path.cwd().resolve())


def steps_of(ran: Mapping[Optimizer, int], model: nn.Module) -> int:
    """Return the number of steps of an optimizer that holds parameters of the model."""
    own = set(model.parameters())
    held = {o: own.intersection(p for g in o.param_groups for p in g["params"]) for o in ran}
    return max((steps for optimizer, steps in ran.items() if held[optimizer]), default=0)


class _Refused(BaseException):
    """Ends the user's code, past any `except Exception` in it."""


@contextmanager
def watched(*, may_train: bool) -> Iterator[Counter[Optimizer]]:
    """Watch the user's code in a block, which gets the number of steps of each optimizer.

    The first step ends the code, and so does the first call of `torch.save` or safetensors that
    would write over an existing file of the working folder. Files that other functions write are
    not watched.

    Args:
        may_train: whether the code may do both.

    Raises:
        UsageError: the code did so; it names the line.
    """
    steps: Counter[Optimizer] = Counter()
    folder, refused = Path.cwd(), list[str]()

    def refuse(what: str) -> None:
        if not may_train:
            refused.append(f"{place(traceback.extract_stack()) or 'your code'} {what} {_INSTEAD}")
            raise _Refused

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps[optimizer] += 1
        refuse("takes an optimizer step")

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def saves(*args: Any, **kwargs: Any) -> Any:
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            path = Path(file).resolve() if isinstance(file, str | os.PathLike) else None
            if path and path.is_file() and path.is_relative_to(folder):
                refuse(f"writes over {path.relative_to(folder)}")
            return function(*args, **kwargs)

        return saves

    with ExitStack() as watches:
        watches.callback(register_optimizer_step_pre_hook(step).remove)
        watches.enter_context(patch.object(torch, "save", guarded(torch.save)))
        with suppress(ImportError):  # then nothing is written with it
            module = import_module("safetensors.torch")
            watches.enter_context(patch.object(module, "save_file", guarded(module.save_file)))
        try:
            yield steps
        except BaseException:  # the code may have caught the refusal and failed by it
            if not refused:
                raise
        finally:
            may_train = True  # code that has imported a guarded function keeps it
    if refused:
        raise UsageError(refused[0])
