"""Import of objects by their path."""

import pkgutil
import sys
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from adiv_monitor.audit.options.usage import UsageError, is_users, said

# The options that a configuration gives ("MODEL", "--loss"). It must not run code of others: of
# what is written elsewhere, it may name what lies below these modules.
OF_FILE: ContextVar[Collection[str]] = ContextVar("OF_FILE", default=())
_SAFE = ("torch.nn.", "torch.optim.", "torchvision.models.")


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
        names = ", ".join((*known, "package.module:NAME"))
        raise UsageError(f"{where}expected one of {names} or FILE.py:NAME")
    try:
        found = pkgutil.resolve_name(f"{_module_of(module) if is_file else module}:{names}")
    except Exception as error:
        hint = ""
        if isinstance(error, AttributeError):
            hint = close(str(error.name), dir(error.obj)) or _below_main(error.obj)
        raise UsageError(f"{where}{said(error)}{hint}") from error
    home = str(getattr(found, "__module__", None))
    if option in OF_FILE.get() and not _may_be_of_file(found, home):
        raise UsageError(
            f"--config: {path} is code of {home}, neither below the current folder nor a model, "
            f"loss or optimizer of torch; if you trust it, on the command line: {option} {path}"
        )
    return found


def _may_be_of_file(found: Any, home: str) -> bool:
    if not callable(found) or isinstance(found, nn.Module) or home.startswith(_SAFE):
        return True
    file = str(getattr(sys.modules.get(home), "__file__", "<none>"))
    return is_users(file) and Path(file).resolve().is_relative_to(Path.cwd().resolve())


def _module_of(file: str) -> str:
    """Return the name by which a file is imported, from a folder that is put on Python's path."""
    whole = Path(file).resolve(strict=True)
    folder, name = whole.parent, whole.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return name


def _below_main(thing: object) -> str:
    """Return how to make a script auditable if it has code that runs as a script only, else ""."""
    file = str(getattr(thing, "__file__", ""))
    if not file.endswith(".py") or "if __name__ ==" not in Path(file).read_text(encoding="utf-8"):
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
