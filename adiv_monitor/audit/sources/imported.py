"""Import of objects by their path."""

import ast
import importlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from adiv_monitor.audit.options.usage import UsageError, is_users, said

# Options that a configuration gives, and packages that the command line names.
_OF_FILE: ContextVar[tuple[Collection[str], Collection[str]]] = ContextVar("file", default=((), ()))
_KNOWN = ("torch", "torchvision", "timm")  # packages whose modules and optimizers are only built
_SOURCES = ("hf", "random", "digits", "cifar10", "imagefolder", "text")  # names of no packages


@contextmanager
def of_file(options: Collection[str], packages: Collection[str]) -> Iterator[None]:
    """Restrict what these options may name inside a `with`: a configuration must not run any code.

    It may name what is written below the current folder; classes of modules and optimizers of
    torch, torchvision and timm, models of torchvision and functions of torch.nn.functional; and
    what is written in these packages.

    Args:
        options: The options that a configuration gives, as errors name them ("MODEL", "--loss").
        packages: Packages that the command line names, besides these and the named sources.
    """
    token = _OF_FILE.set((options, {*packages}.difference(_KNOWN, _SOURCES)))
    try:
        yield
    finally:
        _OF_FILE.reset(token)


def is_of_file(option: str) -> bool:
    """Return whether a configuration gives the value of an option."""
    return option in _OF_FILE.get()[0]


def imported(path: str, option: str) -> Any:
    """Import the object that `package.module:name`, `package.module.name` or `file.py:name` names.

    Importing a module runs it.

    Args:
        path: The import path; names may have attributes (`module:Class.method`). A file is imported
            as the module that it is in its package, or as Python imports scripts of its folder.
        option: The option that the path belongs to, as errors name it ("MODEL", "--loss").

    Raises:
        UsageError: There is no such module or name, importing it raised, or a configuration names
            what it may not.
    """
    where = f"{option} {path}: "
    module_path, colon, names = path.partition(":")
    if module_path.endswith(".py"):
        if not names:
            raise UsageError(
                f"{where}got a whole file, expected {module_path}:NAME of what is in it"
            )
        module_path = _module_of(module_path, where)
    parts = module_path.split(".")
    attributes = names.split(".") if colon else []
    if not (colon or parts[1:]) or not all(part.isidentifier() for part in [*parts, *attributes]):
        raise UsageError(
            f"{where}expected an import path, such as torchvision.models.resnet18, "
            "package.module:name or FILE.py:NAME"
        )
    if is_of_file(option) and not _may_be_imported(parts[0]):
        raise _not_of_file(path, option, parts[0])
    found: Any
    found, rest = _module(parts, where, all_of_it=bool(colon))
    for name in attributes or rest:
        if not hasattr(found, name):
            what = getattr(found, "__qualname__", getattr(found, "__name__", type(found).__name__))
            hint = close(name, dir(found)) or _below_main(found)
            raise UsageError(f"{where}{what} has no {name!r}{hint}")
        found = getattr(found, name)
    if isinstance(found, ModuleType):
        raise UsageError(f"{where}that is a module, expected {path}:NAME of what is in it")
    if is_of_file(option) and not _may_be_of_file(found):
        raise _not_of_file(path, option, _home(found))
    return found


def _may_be_imported(package: str) -> bool:
    if package in (*_KNOWN, *_OF_FILE.get()[1]):
        return True
    try:
        spec = find_spec(package)  # of a name without dots, it imports nothing
    except ValueError:  # the program itself
        return False
    files = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(map(_is_here, files))


def _may_be_of_file(found: Any) -> bool:
    if not callable(found) or isinstance(found, nn.Module):
        return True
    home = _home(found)
    package = home.partition(".")[0]
    if package in _OF_FILE.get()[1] or _is_here(getattr(sys.modules.get(home), "__file__", None)):
        return True
    if inspect.isclass(found):
        return package in _KNOWN and issubclass(found, (nn.Module, Optimizer))
    models: Any = sys.modules.get("torchvision.models")
    return home == "torch.nn.functional" or (
        models is not None
        and any(models.get_model_builder(x) is found for x in models.list_models())
    )


def _is_here(file: str | None) -> bool:
    """Return whether a file of the user's own lies below the current folder."""
    if file is None or not is_users(file) or not Path(file).exists():  # "built-in" is no file
        return False
    return Path(file).resolve().is_relative_to(Path.cwd().resolve())


def _home(found: Any) -> str:
    """Return the name of the module in which a callable is written."""
    while isinstance(found, partial):
        found = found.func
    return str(getattr(found, "__module__", None) or type(found).__module__)


def _not_of_file(path: str, option: str, home: str) -> UsageError:
    again = path if option == "MODEL" else f"{option} {path}"
    return UsageError(
        f"--config: {option.removeprefix('--').lower()}: got {path}, which is code of {home}; "
        "expected a module or an optimizer of torch, torchvision or timm, or code below the "
        f"current folder. If you trust it, give it on the command line: {again}"
    )


def _module(parts: list[str], where: str, all_of_it: bool) -> tuple[ModuleType, list[str]]:
    """Import the longest module that the parts name; return it and the rest, at least one part.

    So `torchvision.models.googlenet` is the function, not the module of the same name.
    """
    missing: str | None = None
    for length in [len(parts)] if all_of_it else range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):  # raised inside
                raise UsageError(f"{where}importing {name} raised {said(error)}") from error
    raise UsageError(
        f"{where}there is no module {missing!r}; expected one that is installed or lies in the "
        "current folder"
    )


def _module_of(file: str, where: str) -> str:
    """Return the name by which a file is imported, from a folder that is put on Python's path."""
    whole = Path(file).resolve()
    if not whole.is_file():
        raise UsageError(f"{where}there is no file {file}")
    folder, parts = whole.parent, [whole.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    name = ".".join(parts)
    known = getattr(sys.modules.get(name), "__file__", None)
    if known and Path(known).resolve() != whole:
        raise UsageError(f"{where}Python has imported {known} under this name; rename the file")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return name


def _below_main(thing: object) -> str:
    """Return how to make a script auditable if it has code that runs as a script only, else ""."""
    file = getattr(thing, "__file__", None)
    if not isinstance(thing, ModuleType) or not file or not file.endswith(".py"):
        return ""
    body = ast.parse(Path(file).read_bytes()).body
    if not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in body):
        return ""
    return (
        '; what stands below `if __name__ == "__main__":` is not imported. Write three lines above '
        "it, and name them as MODEL, --data and --loss: `def model(): return Net(…)`, "
        "`def batches(): return DataLoader(…)`, `def loss(output, target): return "
        "cross_entropy(output, target)`"
    )


def close(name: str, known: Iterable[str]) -> str:
    """Return a hint at the names that are like the given one, for the end of an error."""
    matches = get_close_matches(name, [each for each in known if not each.startswith("_")])
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def signature(function: Any) -> str:
    """Return the arguments that a class or function takes, for the end of an error."""
    try:
        return f"; it takes {inspect.signature(function)}"
    except (TypeError, ValueError):
        return ""
