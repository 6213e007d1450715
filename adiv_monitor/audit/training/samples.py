"""Fewer samples, or more, than a batch has."""

from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.training.batches import mapped, size_of, tensors


def first(batch: Any, samples: int) -> Any:
    """The first samples of a batch; the batch as it is, if it has no more of them.

    Every tensor as long as the batch is cut, others are shared by all samples.
    """
    size = size_of(batch)
    if size <= samples:
        return batch
    return mapped(batch, lambda x: x[:samples] if x.ndim and len(x) == size else x)


def joined(one: Any, other: Any) -> Any:
    """A batch of the samples of both.

    Raises:
        ValueError: they differ in structure, or in what all samples share.
        RuntimeError: samples differ in shape.
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
