"""Batches with fewer samples, or with those of two batches."""

from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.training.batches import mapped, size_of, tensors


def first(batch: Any, samples: int) -> Any:
    """Return the first samples of a batch; the batch itself if it has no more samples than that.

    Every tensor of the batch's length is cut; all samples share the other tensors.
    """
    size = size_of(batch)
    if size <= samples:
        return batch
    return mapped(batch, lambda x: x[:samples] if x.ndim and len(x) == size else x)


def joined(one: Any, other: Any) -> Any:
    """Return a batch of the samples of both batches.

    Raises:
        ValueError: The batches differ in structure, or in a tensor that all samples share.
        RuntimeError: The samples differ in shape.
    """
    mine, theirs = list(tensors(one)), list(tensors(other))
    size, added = size_of(one), size_of(other)
    if not mine or len(mine) != len(theirs):
        raise ValueError(f"they hold {len(mine)} and {len(theirs)} tensors")
    others = iter(theirs)

    def together(x: Tensor) -> Tensor:
        y = next(others)
        if x.ndim and y.ndim and len(x) == size and len(y) == added:
            return torch.cat([x, y])
        if not torch.equal(x, y):
            raise ValueError("they differ in a tensor that all their samples share")
        return x

    return mapped(one, together)
