"""Samples rows of a layer from any number of calls.

Every row of every call has a key, uniform between 0 and 1. The sample consists of the `max_rows`
rows with the smallest keys, so each row is equally likely, whatever the number and order of calls.
Only the keys that may win are ever drawn: the smallest of T uniform numbers follow from their
spacings (A. Rényi 1953), whatever T is.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from adiv_monitor.features.rows import HOST, Index, Rows


def draw(
    shape: tuple[int, ...],
    most: int | None,
    generator: np.random.Generator,
    device: torch.device = HOST,
) -> Rows:
    """Choose the rows with the smallest keys.

    Args:
        shape: the shape of all rows.
        most: the number of rows to take at most; None: all.
        generator: the random number generator.
        device: the device of the tensors from which rows are gathered.
    """
    total = prod(shape)
    if most is None:
        return Rows(shape, None, device, np.zeros(total))
    count = min(total, most)
    # One more key than rows taken: it bounds the keys that are left out.
    steps = generator.exponential(size=min(count + 1, total))
    keys = -np.expm1(-np.cumsum(steps / (total - np.arange(len(steps)))))
    bound, chosen = np.inf, None
    if count < total:
        bound = float(keys[count])
        chosen = np.sort(generator.choice(total, count, replace=False))
    keys = generator.permutation(keys[:count])
    return Rows(shape, chosen, device, keys, bound)


def winners(several: Sequence[Rows], most: int | None) -> list[Index | None]:
    """Return which drawn rows of each call belong to the sample; None: all of them."""
    if most is None:
        return [None] * len(several)
    keys = [drawn.keys for drawn in several]
    every, bound = np.concatenate(keys), min(drawn.bound for drawn in several)
    if len(every) > most:
        bound = min(bound, float(np.partition(every, most)[most]))
    below = [of_call < bound for of_call in keys]
    return [None if are.all() else np.flatnonzero(are) for are in below]
