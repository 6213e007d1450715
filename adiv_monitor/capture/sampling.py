"""Which rows of a layer are looked at, however many calls they come from.

Every row of every call has a key, drawn evenly between 0 and 1; the sample are the `max_rows` rows
with the smallest keys. So each row is as likely as any other, whatever the number and order of
calls. Only the keys that may win are ever drawn: the smallest of T even numbers follow from their
spacings (A. Rényi 1953), whatever T is.
"""

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


def threshold(draws: list[Draw], most: int | None) -> float:
    """What the key of a row must be below to be in the sample of these calls."""
    bound = min((d.bound for d in draws), default=np.inf)
    keys = np.concatenate([d.keys for d in draws]) if draws else np.empty(0)
    if most is None or len(keys) <= most:
        return bound
    return min(bound, float(np.partition(keys, most)[most]))


def winners(draws: list[Draw], most: int | None) -> list[Index | None]:
    """Which of the gathered rows of every call belong to the sample; None: all of them."""
    bound = threshold(draws, most)
    kept = [np.flatnonzero(d.keys < bound) for d in draws]
    return [None if len(k) == len(d.keys) else k for k, d in zip(kept, draws, strict=True)]
