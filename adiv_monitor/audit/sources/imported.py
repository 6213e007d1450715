"""Import of objects by their path."""

import importlib
import inspect
from types import ModuleType
from typing import Any

from adiv_monitor.audit.options.usage import UsageError, said


def imported(path: str, option: str) -> Any:
    """Import the object that `package.module:name` or `package.module.name` names.

    Importing a module runs it.

    Args:
        path: The import path; names may have attributes (`module:Class.method`).
        option: The option that the path belongs to, as errors name it ("MODEL", "--loss").

    Raises:
        UsageError: There is no such module or name, or importing it raised.
    """
    module_path, colon, names = path.partition(":")
    parts = module_path.split(".")
    if module_path.endswith(".py") or "/" in module_path:
        guess = module_path.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(
            f"{option} {path}: got a file, expected an import path from the current folder, such "
            f"as {guess}:{names or 'NAME'}"
        )
    if not colon and len(parts) == 1:
        raise UsageError(
            f"{option} {path}: expected an import path, such as {path}:NAME or package.module:name"
            f"{_elsewhere(path, option)}"
        )
    if not all(part.isidentifier() for part in [*parts, *(names.split(".") if colon else [])]):
        raise UsageError(f"{option} {path}: expected an import path, such as package.module:name")
    module, rest = _module(parts, path, option, all_of_it=bool(colon))
    found: Any = module
    for name in names.split(".") if colon else rest:
        if not hasattr(found, name):
            known = [n for n in vars(found) if not n.startswith("_")] if colon or rest else []
            raise UsageError(
                f"{option} {path}: {_named(found)} has no {name!r}{_close(name, known)}"
            )
        found = getattr(found, name)
    if isinstance(found, ModuleType):
        raise UsageError(
            f"{option} {path}: that is a module, expected {path}:NAME of what is in it"
        )
    return found


def _module(
    parts: list[str], path: str, option: str, all_of_it: bool
) -> tuple[ModuleType, list[str]]:
    """Import the longest module that the parts name; return it and the rest, at least one part.

    So `torchvision.models.googlenet` is the function, not the module of the same name.
    """
    lengths = [len(parts)] if all_of_it else range(len(parts) - 1, 0, -1)
    for length in lengths:
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # an import inside the module
                raise UsageError(
                    f"{option} {path}: importing {name} raised {said(error)}"
                ) from error
            missing = error.name
        except Exception as error:
            raise UsageError(f"{option} {path}: importing {name} raised {said(error)}") from error
    raise UsageError(
        f"{option} {path}: there is no module {missing!r}; expected one that is installed or lies "
        "in the current folder"
    )


def _named(thing: object) -> str:
    if isinstance(thing, ModuleType):
        return f"the module {thing.__name__}"
    return getattr(thing, "__qualname__", type(thing).__name__)


def _elsewhere(name: str, option: str) -> str:
    """Return a hint for an error if torchvision has a model of that name, else ""."""
    if option != "MODEL":
        return ""
    try:
        from torchvision.models import list_models  # type: ignore[import-untyped]
    except ImportError:
        return ""
    known = {model for model in list_models() if "/" not in model}
    return f"; did you mean torchvision.models.{name}?" if name in known else ""


def _close(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(name, known)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def signature(function: Any) -> str:
    """Return the signature of a class or function, for errors."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "arguments that it does not tell"
    bare = inspect.Parameter.empty
    named = [p.replace(annotation=bare) for p in found.parameters.values()]
    return str(found.replace(parameters=named, return_annotation=bare))
