"""Samples rows of a layer from any number of calls.

Every row of every call has a key, uniform between 0 and 1. The sample consists of the `max_rows`
rows with the smallest keys, so each row is equally likely, whatever the number and order of calls.
Only the keys that may win are ever drawn: the smallest of T uniform numbers follow from their
spacings (A. Rényi 1953), whatever T is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adiv_monitor.features.rows import Index

Keys = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Draw:
    """The rows of one call that were gathered.

    Attributes:
        chosen: their sorted positions; None: all rows.
        keys: the key of each row.
        bound: every row of the call with a smaller key was gathered.
    """

    chosen: Index | None
    keys: Keys
    bound: float


def draw(total: int, most: int | None, bound: float, generator: np.random.Generator) -> Draw:
    """Choose the rows with the smallest keys among `total` rows.

    Args:
        total: the number of rows.
        most: the number of rows to take at most; None: all.
        bound: take only rows with keys below it.
        generator: the random number generator.
    """
    if most is None:
        return Draw(None, np.zeros(total), np.inf)
    count = min(total, most)
    # One more key than rows taken: it bounds the keys that are left out.
    steps = generator.exponential(size=min(count + 1, total))
    keys = -np.expm1(-np.cumsum(steps / (total - np.arange(len(steps)))))
    if count < total:
        bound = min(bound, float(keys[count]))
    keys = keys[:count]
    keys = generator.permutation(keys[keys < bound])
    if len(keys) == total:
        return Draw(None, keys, bound)
    return Draw(np.sort(generator.choice(total, len(keys), replace=False)), keys, bound)


class Threshold:
    """The bound on the key of a row in the sample of several calls, which are added one by one.

    Args:
        most: the number of rows in the sample at most; None: all.
        draws: the rows of the first calls.

    Attributes:
        bound: the keys of sampled rows are smaller.
    """

    def __init__(self, most: int | None, draws: Iterable[Draw]) -> None:
        self.bound = np.inf
        self._most = most
        self._keys: Keys = np.empty(0)  # the keys below the bound
        for drawn in draws:
            self.add(drawn)

    def add(self, drawn: Draw) -> None:
        """Add a call."""
        self.bound = min(self.bound, drawn.bound)
        if self._most is None:
            return
        keys = np.concatenate([self._keys, drawn.keys])
        if len(keys) > self._most:
            self.bound = min(self.bound, float(np.partition(keys, self._most)[self._most]))
        self._keys = keys[keys < self.bound]


def winners(draws: list[Draw], most: int | None) -> list[Index | None]:
    """Return which gathered rows of each call belong to the sample; None: all of them."""
    bound = Threshold(most, draws).bound
    kept = [np.flatnonzero(d.keys < bound) for d in draws]
    return [None if len(k) == len(d.keys) else k for k, d in zip(kept, draws, strict=True)]
