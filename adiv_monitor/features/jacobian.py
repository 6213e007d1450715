"""Features of rows that are not linear in the parameters: J_r ΔΘ is known, but no Φ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import Features


@dataclass(frozen=True)
class JacobianFeatures:
    """First-order moves Δz_r = J_r ΔΘ of rows whose Jacobian J_r is never materialized.

    Attributes:
        move: a change of the parameters, as one vector (P,) → the move of the rows (rows, n_total).
    """

    move: Callable[[Tensor], Tensor]

    @property
    def groups(self) -> int:
        """Number of groups: 1."""
        return 1

    def scale(self) -> None:
        """Return None: a row's effect on itself differs by output, so there is no ‖φ_r‖²."""

    def by_weight(self, weight: Tensor) -> Tensor:
        """Return J_r Θ for a vector of parameters."""
        return self.move(weight)

    def by_bias(self, bias: Tensor) -> None:
        """Return None: all parameters are in the vector of `by_weight`."""

    def restrict(self, *, weight: bool, bias: bool) -> "JacobianFeatures":
        """Return self: only trained parameters are in the vector."""
        return self

    def pick(self, rows: Tensor) -> "JacobianFeatures":
        """Return the features of some of the rows."""
        return JacobianFeatures(lambda vector: self.move(vector).index_select(0, rows))

    def joined(self, others: Sequence[Features]) -> "JacobianFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, JacobianFeatures))]
        return JacobianFeatures(lambda vector: torch.cat([x.move(vector) for x in every]))
