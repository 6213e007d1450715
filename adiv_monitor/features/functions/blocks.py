"""Features of a weight of several blocks of which every row uses one: experts, matrices of heads.

They form one layer with φ = one-hot(block) ⊗ x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.features.features import Features
from adiv_monitor.features.whole import squares


@dataclass(frozen=True)
class BlockFeatures(Features):
    """Features that are a vector of numbers and the index of the block that multiplies it.

    No product gathers a weight per row: there is one product per block, over all rows.

    Attributes:
        phi: (rows, n_feat); zero for rows that use no block.
        block: (rows,) int64, below `count`; `count` for rows that use no block.
        count: number of blocks of the weight, (count, n_out, n_feat).
    """

    phi: Float[Tensor, "rows n_feat"]
    block: Int[Tensor, " rows"]
    count: int

    def scale(self) -> Float[Tensor, "rows 1"]:
        """Return ‖φ_r‖² of every row."""
        return squares(self.phi)[:, None]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_out"]:
        """Return x_r W[block_r]ᵀ of every row."""
        moved = self.phi.new_zeros(len(self.phi), weight.shape[1])
        for block, matrix in enumerate(weight.to(self.phi.dtype)):
            moved.addmm_(self.phi * (self.block == block)[:, None], matrix.t())
        return moved

    def squared(self) -> "BlockFeatures":
        """Return features with φ² in place of φ."""
        return replace(self, phi=self.phi.square())

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Return φ_r·Σ_k a_k φ_k of every row, with the sum over the rows of its block."""
        summed = self._sums(active)
        products: Tensor = torch.linalg.vecdot(self.phi, summed[self.block])
        return products

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " features"]:
        """Return Σ_k a_k φ_k, block by block."""
        return self._sums(active)[: self.count].flatten()

    def _sums(self, active: Float[Tensor, " rows"]) -> Float[Tensor, "count_plus_1 n_feat"]:
        return sums_of_blocks(self.phi * active[:, None], self.block, self.count)

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """Return ‖φ_r‖ of every row."""
        norms: Tensor = torch.linalg.vector_norm(self.phi, dim=1)
        return norms

    def pick(self, rows: Tensor) -> "BlockFeatures":
        """Return the features of some of the rows."""
        return replace(self, phi=self.phi[rows], block=self.block[rows])

    def joined(self, others: Sequence[Features]) -> "BlockFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, BlockFeatures))]
        return replace(
            self,
            phi=torch.cat([features.phi for features in every]),
            block=torch.cat([features.block for features in every]),
        )

    def sums_of_squares(self, gradient: Float[Tensor, "rows n_out"]) -> tuple[Tensor, Tensor]:
        """Return ΦᵀΦ, (count, n_feat, n_feat), and ΦᵀG, (count, n_feat, n_out), in G's dtype."""
        phi = self.phi.to(gradient.dtype)
        parts = [phi * (self.block == block)[:, None] for block in range(self.count)]
        return (
            torch.stack([part.t() @ part for part in parts]),
            torch.stack([part.t() @ gradient for part in parts]),
        )


def sums_of_blocks(
    x: Float[Tensor, "rows n"], block: Int[Tensor, " rows"], count: int
) -> Float[Tensor, "count_plus_1 n"]:
    """Return Σ x over the rows of each block, and last over the rows that use no block."""
    return x.new_zeros(count + 1, x.shape[1]).index_add_(0, block, x)
