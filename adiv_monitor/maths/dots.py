"""Dot products on the device in as few operations as possible; the host does all other arithmetic.

Sequential float32 sums of many similar entries drift, as in norms and `torch.dot` on a CPU (by a
percent over thirty million entries). The sums here are therefore taken in two stages.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.maths.sums import Pairs, Vector

# The most entries of vectors that a CPU multiplies together: for more, new memory costs more.
STACKED = 2**13


def of_rows(
    vectors: Mapping[Vector, Float[Tensor, "*layers rows n"]], pairs: Pairs
) -> Float[Tensor, "*layers rows pairs"]:
    """Return a_r·b_r of every row, in few operations.

    Args:
        vectors: the vectors; neighbours that are pairs lead.
        pairs: all squares, in the order of the vectors; those neighbours; others.
    """
    # All are rounded alike, so that what is equal remains so: ‖d − b‖² is 0 if d is b.
    names = tuple(vectors)
    first = vectors[names[0]]
    if first.is_cpu and first.numel() > STACKED:
        return torch.stack([torch.linalg.vecdot(vectors[a], vectors[b]) for a, b in pairs], -1)
    stacked = torch.stack(list(vectors.values()))
    chain = len(set(pairwise(names)) & set(pairs))
    found = [(stacked * stacked).sum(-1)]
    if chain:
        found += ((stacked[:chain] * stacked[1 : chain + 1]).sum(-1),)
    for a, b in pairs[len(names) + chain :]:
        found += ((vectors[a] * vectors[b]).sum(-1)[None],)
    # Contiguous, so that the transfer to the host copies no layer by itself.
    return torch.cat(found).movedim(0, -1).contiguous()
