"""Warnings of a training that an audit runs many times, each shown once."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OWN = f"{Path(__file__).parents[2]}{os.sep}"  # this package: it runs the training again


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Show each warning once for each line of the training, whatever numbers it names.

    Python forgets which ones it showed wherever filters change for a while, as in some schedulers.
    """
    shown: set[object] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def once(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any
        ) -> None:
            what = (category, re.sub(r"\d+", "", str(message)))
            place = what if filename.startswith(_OWN) else (what, filename, lineno)
            if place not in shown:
                shown.update((what, place))
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = once  # type: ignore[assignment]
        yield
