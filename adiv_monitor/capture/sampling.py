"""Which rows of a layer are looked at, however many calls they come from.

Every row of every call has a key, drawn evenly between 0 and 1; the sample are the `max_rows` rows
with the smallest keys. So each row is as likely as any other, whatever the number and order of
calls. Only the keys that may win are ever drawn: the smallest of T even numbers follow from their
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
        chosen: their sorted positions; None: all.
        keys: a key each.
        bound: every row of the call whose key is smaller was gathered.
    """

    chosen: Index | None
    keys: Keys
    bound: float


def draw(total: int, most: int | None, bound: float, generator: np.random.Generator) -> Draw:
    """Choose, of `total` rows, those with the smallest keys.

    Args:
        total: how many rows there are.
        most: how many to take at most; None: all.
        bound: take only keys below it.
        generator: the source of chance.
    """
    if most is None:
        return Draw(None, np.zeros(total), np.inf)
    count = min(total, most)
    # One more than is taken: it says how small a key that was left out may be.
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
    """What the key of a row must be below to be in the sample of some calls, told one by one.

    Args:
        most: how many rows the sample has at most; None: all.
        draws: the rows of the first calls.

    Attributes:
        bound: what the key must be below.
    """

    def __init__(self, most: int | None, draws: Iterable[Draw] = ()) -> None:
        self.bound = np.inf
        self._most = most
        self._keys: Keys = np.empty(0)  # those below
        for drawn in draws:
            self.add(drawn)

    def add(self, drawn: Draw) -> None:
        """A further call."""
        self.bound = min(self.bound, drawn.bound)
        if self._most is None:
            return
        keys = np.concatenate([self._keys, drawn.keys])
        if len(keys) > self._most:
            self.bound = min(self.bound, float(np.partition(keys, self._most)[self._most]))
        self._keys = keys[keys < self.bound]


def winners(draws: list[Draw], most: int | None) -> list[Index | None]:
    """Which of the gathered rows of every call belong to the sample; None: all of them."""
    bound = Threshold(most, draws).bound
    kept = [np.flatnonzero(d.keys < bound) for d in draws]
    return [None if len(k) == len(d.keys) else k for k, d in zip(kept, draws, strict=True)]
