"""The features φ of a layer's rows: what makes its output linear in its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Features(Protocol):
    """φ of some rows; Θ = [W | b], z = Θφ."""

    def scale(self) -> Float[Tensor, "rows groups"]:
        """‖φ_r‖² of every row and group: the diagonal of M = ΦΦᵀ."""
        ...

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Φ_W Wᵀ for a tensor shaped like the weight; None if the weight is not trained."""
        ...

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """φ_b ⊗ b for a tensor shaped like the bias; None if there is no trained bias."""
        ...

    def restrict(self, *, weight: bool, bias: bool) -> "Features":
        """The features of the trained parameters alone."""
        ...

    def pick(self, rows: Tensor) -> "Features":
        """The features of some of the rows."""
        ...

    def joined(self, others: Sequence["Features"]) -> "Features":
        """These rows and those of other calls of the same layer."""
        ...


@dataclass(frozen=True)
class DenseFeatures:
    """Features that are vectors of numbers.

    Attributes:
        phi: (rows, groups, n_feat), the features that the weight multiplies. The weight is read as
            (groups, n_out, n_feat), which is how torch lays out linear, grouped convolution and
            gain weights.
        bias: (rows,), the feature φ_b that the bias multiplies (1, or 1/s); None without a bias.
        transposed: the weight is stored (n_feat, n_out) instead.
    """

    phi: Float[Tensor, "rows groups n_feat"] | None
    bias: Float[Tensor, " rows"] | None = None
    transposed: bool = False

    def scale(self) -> Float[Tensor, "rows groups"]:
        """‖φ_r‖², the bias's feature included."""
        squares = [] if self.phi is None else [torch.linalg.vecdot(self.phi, self.phi)]
        if self.bias is not None:
            squares.append(self.bias.square()[:, None])
        return squares[0] + squares[1] if len(squares) == 2 else squares[0]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Φ_W Wᵀ, group by group."""
        if self.phi is None:
            return None
        rows, groups, n_feat = self.phi.shape
        weight = weight.to(self.phi.dtype)
        if groups == 1:
            matrix = weight if self.transposed else weight.reshape(-1, n_feat).t()
            return self.phi[:, 0] @ matrix
        blocks = weight.reshape(groups, -1, n_feat)
        if n_feat == 1 and blocks.shape[1] == 1:
            return self.phi[..., 0] * blocks[:, 0, 0]
        return torch.einsum("rgp,gnp->rgn", self.phi, blocks).reshape(rows, -1)

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """φ_b ⊗ b."""
        if self.bias is None:
            return None
        return self.bias[:, None] * bias.reshape(1, -1).to(self.bias.dtype)

    def restrict(self, *, weight: bool, bias: bool) -> "DenseFeatures":
        """The features of the trained parameters alone."""
        return replace(self, phi=self.phi if weight else None, bias=self.bias if bias else None)

    def pick(self, rows: Tensor) -> "DenseFeatures":
        """The features of some of the rows."""
        return replace(
            self,
            phi=None if self.phi is None else self.phi[rows],
            bias=None if self.bias is None else self.bias[rows],
        )

    def joined(self, others: Sequence[Features]) -> "DenseFeatures":
        """These rows and those of other calls of the same layer."""
        if not others:
            return self
        every = [self, *(other for other in others if isinstance(other, DenseFeatures))]
        phi = [f.phi for f in every if f.phi is not None]
        bias = [f.bias for f in every if f.bias is not None]
        return replace(self, phi=torch.cat(phi) if phi else None, bias=torch.cat(bias) if bias else None)

    def columns(self) -> Float[Tensor, "rows groups n_columns"]:
        """Φ itself, with the bias's feature as its last column."""
        if self.phi is None or self.bias is None:
            lone = self.bias[:, None, None] if self.phi is None else self.phi
            assert lone is not None
            return lone
        column = self.bias[:, None, None].expand(-1, self.phi.shape[1], 1)
        return torch.cat([self.phi, column], dim=2)


@dataclass(frozen=True)
class OneHotFeatures:
    """Features that pick one row of the weight: an embedding's.

    Attributes:
        token: (rows,) int64, the weight's row.
        trained: (rows,), 1, or 0 where that row of the weight gets no gradient (padding); an
            optimizer may move it all the same, by weight decay say.
        vocabulary: how many rows the weight has.
    """

    token: Int[Tensor, " rows"]
    trained: Float[Tensor, " rows"]
    vocabulary: int

    def scale(self) -> Float[Tensor, "rows 1"]:
        """1 for every token that is trained."""
        return self.trained[:, None]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"]:
        """The weight's rows."""
        return weight[self.token].to(self.trained.dtype)

    def by_bias(self, bias: Tensor) -> None:
        """An embedding has no bias."""

    def restrict(self, *, weight: bool, bias: bool) -> "OneHotFeatures":
        """There is only the weight."""
        return self

    def pick(self, rows: Tensor) -> "OneHotFeatures":
        """The features of some of the rows."""
        return replace(self, token=self.token[rows], trained=self.trained[rows])

    def joined(self, others: Sequence[Features]) -> "OneHotFeatures":
        """These rows and those of other calls of the same layer."""
        every = [self, *(other for other in others if isinstance(other, OneHotFeatures))]
        return replace(
            self,
            token=torch.cat([f.token for f in every]),
            trained=torch.cat([f.trained for f in every]),
        )
