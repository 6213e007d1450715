"""How kernels see tensors."""

import torch
from torch import Tensor


def as_images(x: Tensor) -> Tensor | None:
    """Rows (..., channels) as (images, positions, channels) where they lie; None: they can't be."""
    for shape in ((1, -1), (x.shape[0], -1)) if x.dim() > 1 else ((1, 1),):
        try:
            return x.detach().view(*shape, x.shape[-1])
        except RuntimeError:  # not in even steps
            continue
    return None


def lies_alike(*tensors: Tensor) -> bool:
    """Whether all fill their memory without a gap, entry by entry in the same order."""
    first = tensors[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)
    return alike and torch.ops.aten.is_non_overlapping_and_dense(first)
