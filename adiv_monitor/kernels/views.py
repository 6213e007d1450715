"""The views through which kernels read tensors."""

import torch
from torch import Tensor


def as_images(x: Tensor) -> Tensor | None:
    """View rows (..., channels) as (images, positions, channels); return None if impossible."""
    for shape in ((1, -1), (x.shape[0], -1)) if x.dim() > 1 else ((1, 1),):
        try:
            return x.detach().view(*shape, x.shape[-1])
        except RuntimeError:  # the strides allow no such view
            continue
    return None


def lies_alike(*tensors: Tensor) -> bool:
    """Return whether all tensors are dense in memory, with the same shape and strides."""
    first = tensors[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)
    return alike and torch.ops.aten.is_non_overlapping_and_dense(first)
