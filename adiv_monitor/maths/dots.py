"""Dot products of rows' vectors on the device."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.maths.sums import Pairs, Vector


def of_rows(
    vectors: Mapping[Vector, Float[Tensor, "rows n"]], pairs: Pairs
) -> Float[Tensor, "rows pairs"]:
    """Return a_r·b_r of every row; all are rounded alike, so that what is equal remains so."""
    return torch.stack([torch.linalg.vecdot(vectors[a], vectors[b]) for a, b in pairs], -1)
