"""Dot products and norms on the device.

Sequential float32 sums of many similar entries drift, as in norms and `torch.dot` on a CPU (by a
percent over thirty million entries). The sums here are therefore taken in two stages.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.maths.sums import Pairs, Vector


def of_rows(
    vectors: Mapping[Vector, Float[Tensor, "rows n"]], pairs: Pairs
) -> Float[Tensor, "rows pairs"]:
    """Return a_r·b_r of every row; all are rounded alike, so that what is equal remains so."""
    return torch.stack([torch.linalg.vecdot(vectors[a], vectors[b]) for a, b in pairs], -1)


def norms(tensor: Tensor) -> Float[Tensor, " parts"]:
    """Return norms of parts of a tensor; their squares add up to the square of its norm."""
    flat = to_compute_dtype(tensor)
    if flat.dim() < 2:
        flat = flat.reshape(1, -1)
    found: Tensor = torch.linalg.vector_norm(flat.flatten(1), dim=1)
    return found


def norm(tensor: Tensor) -> Float[Tensor, ""]:
    """Return ‖tensor‖, summed in two stages."""
    found: Tensor = torch.linalg.vector_norm(norms(tensor))
    return found
