"""Deprecated import paths: moved names are still found there, with a warning."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose names have moved to another module.

    Args:
        old: name of the old module.
        new: name of the module that has the names now.
    """

    def find(name: str) -> Any:
        if not name.startswith("__") and hasattr(module := import_module(new), name):
            warnings.warn(
                f"{old}.{name} has moved: import it from {new}", DeprecationWarning, stacklevel=2
            )
            return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find
