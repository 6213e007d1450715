"""Dot products on the device, in as few operations as can be; all further arithmetic is the host's.

Float32 sums of many alike entries drift where they are added up one after the other, as norms and
`torch.dot` do on a CPU (by a percent over thirty million): here they are taken in two stages.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.kernels.choice import counts_launches


def of_rows(vectors: Sequence[Float[Tensor, "rows n"]]) -> Float[Tensor, "rows k k"]:
    """a_r·b_r of every row, for every pair of the k matrices."""
    stacked = torch.stack(list(vectors), dim=1)
    return stacked @ stacked.mT


def norms(tensor: Tensor) -> Float[Tensor, " parts"]:
    """Norms of parts of a tensor whose squares add up to its own square."""
    return norms_of([tensor])[0]


def norms_of(tensors: list[Tensor]) -> list[Float[Tensor, " parts"]]:
    """The same of several, in one operation where launches cost: a GPU sums in stages anyway."""
    if tensors and counts_launches(*tensors):
        found = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        return [norm.reshape(1) for norm in found]
    return [_of_parts(to_compute_dtype(tensor)) for tensor in tensors]


def _of_parts(flat: Tensor) -> Tensor:
    if flat.dim() < 2:
        flat = flat.reshape(1, -1)
    found: Tensor = torch.linalg.vector_norm(flat.flatten(1), dim=1)
    return found


def norm(tensor: Tensor) -> Float[Tensor, ""]:
    """‖tensor‖ in two stages."""
    found: Tensor = torch.linalg.vector_norm(norms(tensor))
    return found
