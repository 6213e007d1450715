"""Features of rows that are not linear in the parameters: J_r ΔΘ is known, but no Φ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import Features


@dataclass(frozen=True)
class JacobianFeatures(Features):
    """First-order moves Δz_r = J_r ΔΘ of rows whose Jacobian J_r is never materialized.

    Attributes:
        move: a change of the parameters, as one vector (P,) → the move of the rows (rows, n_total).
    """

    move: Callable[[Tensor], Tensor]

    def by_weight(self, weight: Tensor) -> Tensor:
        """Return J_r Θ for a vector of parameters."""
        return self.move(weight)

    def pick(self, rows: Tensor) -> "JacobianFeatures":
        """Return the features of some of the rows."""
        return JacobianFeatures(lambda vector: self.move(vector).index_select(0, rows))

    def joined(self, others: Sequence[Features]) -> "JacobianFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, JacobianFeatures))]
        return JacobianFeatures(lambda vector: torch.cat([x.move(vector) for x in every]))
