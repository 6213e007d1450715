"""The order in which a loader returns its samples, and the generators that draw it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler


@contextmanager
def as_drawn(batches: object) -> Iterator[None]:
    """Restore the generators of a loader after the block, in which they draw the run's order."""
    before = [(generator, generator.get_state()) for generator in _generators(batches)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def is_drawn_anew(batches: object) -> bool:
    """Return whether a loader draws its order with torch's own random numbers."""
    if not isinstance(batches, DataLoader):
        return False
    sampler = batches.sampler
    if isinstance(batches.batch_sampler, BatchSampler):
        sampler = batches.batch_sampler.sampler
    return isinstance(sampler, RandomSampler) and not _generators(batches)


def in_words(batches: object) -> str:
    """Return the class of a loader with that of its data set, or of another iterable."""
    kind = type(batches).__name__
    data_set = getattr(batches, "dataset", None)
    return kind if data_set is None else f"{kind} of {type(data_set).__name__}"


def _generators(batches: object) -> list[Any]:
    by_batch = getattr(batches, "batch_sampler", None)
    holders = (batches, getattr(batches, "sampler", None), by_batch,
               getattr(by_batch, "sampler", None))  # fmt: skip
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if hasattr(g, "get_state")}.values())
