"""Rows whose move with the parameters is known to first order only: no Φ, but what J_r ΔΘ is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adiv_monitor.features.features import Features


@dataclass(frozen=True)
class JacobianFeatures:
    """Δz_r = J_r ΔΘ of rows whose Jacobian J_r is never written down.

    Attributes:
        move: a change of the parameters, as one vector (P,) → the move of the rows (rows, n_total).
    """

    move: Callable[[Tensor], Tensor]

    @property
    def groups(self) -> int:
        """One layer."""
        return 1

    def scale(self) -> None:
        """There is no ‖φ_r‖²: what a row does to itself differs from output to output."""

    def by_weight(self, weight: Tensor) -> Tensor:
        """J_r Θ of a vector of parameters."""
        return self.move(weight)

    def by_bias(self, bias: Tensor) -> None:
        """All parameters are in the one vector."""

    def restrict(self, *, weight: bool, bias: bool) -> "JacobianFeatures":
        """Only trained parameters are in the vector."""
        return self

    def pick(self, rows: Tensor) -> "JacobianFeatures":
        """The features of some of the rows."""
        return JacobianFeatures(lambda vector: self.move(vector).index_select(0, rows))

    def joined(self, others: Sequence[Features]) -> "JacobianFeatures":
        """These rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, JacobianFeatures))]
        return JacobianFeatures(lambda vector: torch.cat([x.move(vector) for x in every]))
