"""Samples rows of a layer from any number of calls.

Every row of every call has a key, uniform between 0 and 1. The sample consists of the `max_rows`
rows with the smallest keys, so each row is equally likely, whatever the number and order of calls.
Only the keys that may win are ever drawn: the smallest of T uniform numbers follow from their
spacings (A. Rényi 1953), whatever T is.
"""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch

from adiv_monitor.features.rows import HOST, Index, Keys, Rows


def draw(
    shape: tuple[int, ...],
    most: int | None,
    bound: float,
    generator: np.random.Generator,
    device: torch.device = HOST,
) -> Rows:
    """Choose the rows with the smallest keys.

    Args:
        shape: the shape of all rows.
        most: the number of rows to take at most; None: all.
        bound: take only rows with keys below it.
        generator: the random number generator.
        device: the device of the tensors from which rows are gathered.
    """
    total = prod(shape)
    if most is None:
        return Rows(shape, None, device, np.zeros(total), np.inf)
    count = min(total, most)
    # One more key than rows taken: it bounds the keys that are left out.
    steps = generator.exponential(size=min(count + 1, total))
    keys = -np.expm1(-np.cumsum(steps / (total - np.arange(len(steps)))))
    if count < total:
        bound = min(bound, float(keys[count]))
    keys = keys[:count]
    keys = generator.permutation(keys[keys < bound])
    chosen = None
    if len(keys) < total:
        chosen = np.sort(generator.choice(total, len(keys), replace=False))
    return Rows(shape, chosen, device, keys, bound)


class Threshold:
    """The bound on the key of a row in the sample of several calls, which are added one by one.

    Args:
        most: the number of rows in the sample at most; None: all.
        several: the rows of the first calls.

    Attributes:
        bound: the keys of sampled rows are smaller.
    """

    def __init__(self, most: int | None, several: Iterable[Rows]) -> None:
        self.bound = np.inf
        self._most = most
        self._keys: Keys = np.empty(0)  # the keys below the bound
        for drawn in several:
            self.add(drawn)

    def add(self, drawn: Rows) -> None:
        """Add a call."""
        self.bound = min(self.bound, drawn.bound)
        if self._most is None:
            return
        keys = np.concatenate([self._keys, _keys(drawn)])
        if len(keys) > self._most:
            self.bound = min(self.bound, float(np.partition(keys, self._most)[self._most]))
        self._keys = keys[keys < self.bound]


def winners(several: Sequence[Rows], most: int | None) -> list[Index | None]:
    """Return which drawn rows of each call belong to the sample; None: all of them."""
    bound = Threshold(most, several).bound
    below = [_keys(drawn) < bound for drawn in several]
    return [None if are.all() else np.flatnonzero(are) for are in below]


def _keys(drawn: Rows) -> Keys:
    assert drawn.keys is not None
    return drawn.keys
