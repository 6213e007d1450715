"""Old import paths: what has moved is found there still, with a warning."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names are in another one now.

    Args:
        old: name of the module.
        new: name of the one that has them.
    """

    def find(name: str) -> Any:
        if not name.startswith("__") and hasattr(module := import_module(new), name):
            warnings.warn(
                f"{old}.{name} has moved: import it from {new}", DeprecationWarning, stacklevel=2
            )
            return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find
