"""Features of parameters from which the forward pass computes the layer's weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.features import Averaged, Features


@runtime_checkable
class Squared(Protocol):
    """Features whose entries can be squared."""

    def squared(self) -> Features | None:
        """Return features with φ² in place of φ; None if a row's scale is not Σ φ²."""
        ...


@dataclass(frozen=True)
class MadeFeatures:
    """φ of a weight Θ = f(θ), with the scales for training the parameters θ.

    A gradient step moves Θ by JJᵀ(GᵀΦ), J = ∂Θ/∂θ. If JJᵀ is diagonal with entries a_np, a row
    alone moves its own output n by Σ_p a_np φ_rp² g_rn: the scale is Σ_p a_np φ_rp².

    Attributes:
        features: the features that Θ multiplies.
        own: (rows, n_total), Σ_p a_np φ_rp²; None if there are no scales.
    """

    features: Features
    own: Float[Tensor, "rows n_total"] | None

    @property
    def groups(self) -> int:
        """Number of scales of a row: one per output if `own` is set."""
        return self.features.groups if self.own is None else self.own.shape[1]

    def scale(self) -> Float[Tensor, "rows n_total"] | None:
        """Return Σ_p a_np φ_rp² of every row and output; None if there are no scales."""
        return self.own

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return Φ_W Wᵀ for a tensor shaped like the computed weight."""
        return self.features.by_weight(weight)

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return φ_b ⊗ b for a tensor shaped like the computed bias."""
        return self.features.by_bias(bias)

    def restrict(self, *, weight: bool, bias: bool) -> Features:
        """Return the features of the trained parameters alone, without the scales."""
        return self.features.restrict(weight=weight, bias=bias)

    def pick(self, rows: Tensor) -> Features:
        """Return the features of some of the rows."""
        own = None if self.own is None else self.own[rows]
        return MadeFeatures(self.features.pick(rows), own)

    def joined(self, others: Sequence[Features]) -> Features:
        """Return the weight's features of these rows and other calls' rows, without the scales."""
        return self.features.joined(others)

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"] | None:
        """Return φ_W,r·Σ_k a_k φ_W,k of every row; None if the features are not `Averaged`."""
        if not isinstance(self.features, Averaged):
            return None
        return self.features.mean_products(active)

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " features"]:
        """Return Σ_k a_k φ_W,k; only if `mean_products` is not None."""
        assert isinstance(self.features, Averaged)
        return self.features.weight_sum(active)

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """Return ‖φ_W,r‖ of every row."""
        assert isinstance(self.features, Averaged)
        return self.features.weight_norms()
