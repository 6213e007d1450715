"""Largest singular value and stable rank of a layer's weight, and of its update."""

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.step.own_measures import OwnMeasure

# Products with MᵀM, and after how many of them the vector is scaled again: each may make it as many
# times smaller as M has rows.
_ITERATIONS, _SCALED = 30, 5


def sigma(M: Float[Tensor, "outputs inputs"]) -> Float[Tensor, ""]:
    """Return σ₁ of a matrix by 30 steps of power iteration, from the same random vector always.

    It is a lower bound, which misses the more the nearer σ₂ is, but then only by the little that
    lies between the two. NaN if the matrix is zero.
    """
    norm = M.norm()
    M = M / norm
    v = torch.randn(M.shape[1], generator=torch.Generator().manual_seed(0)).to(M)
    for i in range(_ITERATIONS):
        v = M.T @ (M @ v)
        if i % _SCALED == 0:
            v = v / v.norm()
    found: Tensor = norm * (M @ v).norm() / v.norm()
    return found


def stable_rank(M: Float[Tensor, "outputs inputs"]) -> Float[Tensor, ""]:
    """Return ‖M‖²/σ₁²: 1 if M is of rank 1, at most its rank."""
    found: Tensor = (M.norm() / sigma(M)).square()
    return found


# The measures of `Monitor(spectral=True)`.
SPECTRAL: dict[str, OwnMeasure] = {
    "update_sigma": lambda rows: sigma(rows.update),
    "update_stable_rank": lambda rows: stable_rank(rows.update),
    "weight_sigma": lambda rows: sigma(rows.weight),
    "weight_stable_rank": lambda rows: stable_rank(rows.weight),
}
