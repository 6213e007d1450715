"""Import of objects by their path."""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from adiv_monitor.audit.options.usage import UsageError, said


def imported(path: str, option: str) -> Any:
    """Import the object that `package.module:name`, `package.module.name` or `file.py:name` names.

    Importing a module runs it.

    Args:
        path: The import path; names may have attributes (`module:Class.method`). A file is imported
            as the module that it is in its package, or as Python imports scripts of its folder.
        option: The option that the path belongs to, as errors name it ("MODEL", "--loss").

    Raises:
        UsageError: There is no such module or name, or importing it raised.
    """
    module_path, colon, names = path.partition(":")
    if module_path.endswith(".py"):
        if not colon or not names:
            raise UsageError(
                f"{option} {path}: got a whole file, expected {module_path}:NAME of what is in it"
            )
        module_path = _module_of(module_path, path, option)
    elif "/" in module_path:
        raise UsageError(
            f"{option} {path}: got a folder or a file of another kind, expected "
            "package.module:name or FILE.py:NAME"
        )
    parts = module_path.split(".")
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
                f"{option} {path}: {_named(found)} has no {name!r}"
                f"{_close(name, known) or _below_main(found)}"
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


def _module_of(file: str, path: str, option: str) -> str:
    """Return the name by which a file is imported, from a folder that is put on Python's path."""
    whole = Path(file).resolve()
    if not whole.is_file():
        raise UsageError(f"{option} {path}: there is no file {file}")
    folder, parts = whole.parent, [whole.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    name = ".".join(parts)
    known = getattr(sys.modules.get(name), "__file__", None)
    if not whole.stem.isidentifier() or (known and Path(known).resolve() != whole):
        raise UsageError(
            f"{option} {path}: Python can't import a file of this name"
            f"{f' beside {known}' if known else ''}; give the file another name"
        )
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
