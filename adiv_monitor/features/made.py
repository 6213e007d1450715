"""Features of parameters that act through a weight which is made of them."""

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
        """The same features with φ² in place of φ; None if a row's own part is not Σ φ²."""
        ...


@dataclass(frozen=True)
class MadeFeatures:
    """φ of a weight Θ = f(θ), with the scales of the parameters θ, which are trained.

    A gradient step moves Θ by JJᵀ(GᵀΦ), J = ∂Θ/∂θ. Where JJᵀ is a diagonal matrix, with entries
    a_np, a row alone moves its own output n by Σ_p a_np φ_rp² g_rn: that sum is its scale.

    Attributes:
        features: of the rows, as Θ sees them.
        own: (rows, n_total), Σ_p a_np φ_rp²; None: these features have no scales.
    """

    features: Features
    own: Float[Tensor, "rows n_total"] | None

    @property
    def groups(self) -> int:
        """A scale for each output."""
        return self.features.groups if self.own is None else self.own.shape[1]

    def scale(self) -> Float[Tensor, "rows n_total"] | None:
        """Σ_p a_np φ_rp² of every row and output."""
        return self.own

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Φ_W Wᵀ for a tensor shaped like the made weight."""
        return self.features.by_weight(weight)

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """φ_b ⊗ b for a tensor shaped like the made bias."""
        return self.features.by_bias(bias)

    def restrict(self, *, weight: bool, bias: bool) -> Features:
        """The features of the trained parameters alone."""
        return self.features.restrict(weight=weight, bias=bias)

    def pick(self, rows: Tensor) -> Features:
        """The features of some of the rows."""
        own = None if self.own is None else self.own[rows]
        return MadeFeatures(self.features.pick(rows), own)

    def joined(self, others: Sequence[Features]) -> Features:
        """These rows and those of other calls, as the weight sees them."""
        return self.features.joined(others)

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"] | None:
        """φ_W,r·Σ_k a_k φ_W,k of every row; None where the features are not averaged."""
        if not isinstance(self.features, Averaged):
            return None
        return self.features.mean_products(active)

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " features"]:
        """Σ_k a_k φ_W,k, where there are products."""
        assert isinstance(self.features, Averaged)
        return self.features.weight_sum(active)

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """‖φ_W,r‖ of every row."""
        assert isinstance(self.features, Averaged)
        return self.features.weight_norms()
