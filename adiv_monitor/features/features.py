"""The features φ of a layer's rows: what makes its output linear in its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.features.whole import squares as row_squares


@runtime_checkable
class Features(Protocol):
    """φ of some rows; Θ = [W | b], z = Θφ."""

    @property
    def groups(self) -> int:
        """How many independent layers this is."""
        ...

    def scale(self) -> Float[Tensor, "rows groups"] | None:
        """‖φ_r‖² of every row and group: the diagonal of M = ΦΦᵀ; None where there is none."""
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


@runtime_checkable
class Averaged(Protocol):
    """Features that tell how much of them is common to several rows."""

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"] | None:
        """φ_W,r·Σ_k a_k φ_W,k of every row."""
        ...

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " features"]:
        """Σ_k a_k φ_W,k, in one dimension, where there are products."""
        ...

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """‖φ_W,r‖ of every row."""
        ...


@dataclass(frozen=True)
class DenseFeatures:
    """Features that are vectors of numbers.

    Attributes:
        phi: (rows, groups, n_feat), the features that the weight multiplies. The weight is read as
            (groups, n_out, n_feat), which is how torch lays out linear, grouped convolution and
            gain weights.
        bias: the feature φ_b that the bias multiplies: one number for all rows (mostly 1), or
            (rows, groups) or (rows, 1) for all groups; None without a bias.
        transposed: the weight is stored (n_feat, n_out) instead.
        weight_gain: (rows, groups), what the layer's backward pass multiplies a row's part of the
            weight's gradient by (gradient-only layers); None: nothing.
        bias_gain: (rows, groups), the same for the bias.
        mixes_rows: the layer's backward pass mixes the rows (gradient-only, batch), so that M has
            no diagonal of single rows.
    """

    phi: Float[Tensor, "rows groups n_feat"] | None
    bias: Float[Tensor, "rows groups_or_1"] | float | None = None
    transposed: bool = False
    weight_gain: Float[Tensor, "rows groups"] | None = None
    bias_gain: Float[Tensor, "rows groups"] | None = None
    mixes_rows: bool = False

    def __post_init__(self) -> None:
        if self.phi is None and not isinstance(self.bias, Tensor):
            raise ValueError(
                f"DenseFeatures: got phi=None and bias={self.bias}, expected features for the "
                "weight, or a feature (rows, 1) for the bias of every row"
            )
        for name, dims in (("phi", 3), ("bias", 2), ("weight_gain", 2), ("bias_gain", 2)):
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor) and tensor.dim() != dims:
                raise ValueError(
                    f"DenseFeatures({name}=…): got shape {tuple(tensor.shape)}, expected {dims} "
                    "dimensions (rows, groups, …); a plain layer is one group: use x[:, None]"
                )

    @property
    def groups(self) -> int:
        """How many independent layers this is."""
        widest = self.bias if self.phi is None else self.phi
        return widest.shape[1] if isinstance(widest, Tensor) else 1

    def scale(self) -> Float[Tensor, "rows groups"] | None:
        """‖φ_r‖², the bias's feature included; of gradient-only layers, with their gains."""
        if self.mixes_rows:
            return None
        parts: list[Any] = []
        if self.phi is not None:
            alone = self.phi.shape[2] == 1
            squares = self.phi[..., 0].square() if alone else row_squares(self.phi)
            parts.append(squares if self.weight_gain is None else squares * self.weight_gain)
        if self.bias is not None:
            square: Tensor | float = self.bias**2
            parts.append(square if self.bias_gain is None else square * self.bias_gain)
        found: Tensor = parts[0] + parts[1] if len(parts) == 2 else parts[0]
        return found

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Φ_W Wᵀ, group by group."""
        if self.phi is None:
            return None
        _, groups, n_feat = self.phi.shape
        weight = weight.to(self.phi.dtype)
        if groups == 1:
            matrix = weight if self.transposed else weight.reshape(-1, n_feat).t()
            return self.phi[:, 0] @ matrix
        blocks = weight.reshape(groups, -1, n_feat)
        if n_feat == 1 and blocks.shape[1] == 1:
            return self.phi[..., 0] * blocks[:, 0, 0]
        if blocks.shape[1] == 1:  # a depthwise convolution
            if _lies_across(self.phi):  # lay the weight so, too: it is read over and over
                return (self.phi.mT * blocks[:, 0].T.contiguous()).sum(1)
            return (self.phi * blocks[:, 0]).sum(-1)
        return torch.einsum("rgp,gnp->rgn", self.phi, blocks).flatten(1)

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """φ_b ⊗ b."""
        if self.bias is None:
            return None
        if not isinstance(self.bias, Tensor):
            assert self.phi is not None
            row = bias.reshape(1, -1).to(self.phi.dtype)
            return (row if self.bias == 1 else self.bias * row).expand(len(self.phi), -1)
        blocks = bias.reshape(self.bias.shape[1], -1).to(self.bias.dtype)
        return (self.bias[..., None] * blocks).flatten(1)

    def squared(self) -> "DenseFeatures | None":
        """φ² in place of φ; None where a row's part of the gradient is weighed."""
        if self.mixes_rows or self.weight_gain is not None or self.bias_gain is not None:
            return None
        phi = None if self.phi is None else self.phi.square()
        return replace(self, phi=phi, bias=None if self.bias is None else self.bias**2)

    def restrict(self, *, weight: bool, bias: bool) -> "DenseFeatures":
        """The features of the trained parameters alone."""
        if (weight or self.phi is None) and (bias or self.bias is None):
            return self
        return replace(self, phi=self.phi if weight else None, bias=self._column if bias else None)

    def pick(self, rows: Tensor) -> "DenseFeatures":
        """The features of some of the rows."""
        return self._with({name: tensor[rows] for name, tensor in self._tensors().items()})

    def joined(self, others: Sequence[Features]) -> "DenseFeatures":
        """These rows and those of other calls of the same layer."""
        if not others:
            return self
        every = [self, *(other for other in others if isinstance(other, DenseFeatures))]
        parts = [features._tensors() for features in every]
        return self._with({name: torch.cat([p[name] for p in parts]) for name in parts[0]})

    @property
    def _column(self) -> Float[Tensor, "rows groups_or_1"] | None:
        """φ_b of every row."""
        if self.bias is None or isinstance(self.bias, Tensor):
            return self.bias
        assert self.phi is not None
        return self.phi.new_full((len(self.phi), 1), self.bias)

    @property
    def has_gram(self) -> bool:
        """Whether M = ΦΦᵀ is one matrix, of rows × rows numbers."""
        return self.groups == 1 and self.weight_gain is None and not self.mixes_rows

    def gram(self) -> Float[Tensor, "rows rows"]:
        """M = ΦΦᵀ of one group."""
        if self.phi is None or isinstance(self.bias, Tensor):
            columns = self.columns()[:, 0]
            return columns @ columns.T
        gram = self.phi[:, 0] @ self.phi[:, 0].T
        return gram if self.bias is None else gram.add_(self.bias**2)

    def times(self, v: Float[Tensor, " columns"]) -> Float[Tensor, " rows"]:
        """Φ v of one group; the bias's column comes last."""
        width = 0 if self.phi is None else self.phi.shape[2]
        moved = None if self.phi is None else self.phi[:, 0] @ v[:width]
        if self.bias is None:
            assert moved is not None
            return moved
        bias = self.bias[:, 0] if isinstance(self.bias, Tensor) else self.bias
        return bias * v[width] if moved is None else moved + bias * v[width]

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"] | None:
        """φ_W,r·Σ_k a_k φ_W,k of every row: how much of it is common to the active rows."""
        if self.phi is None:
            return None
        rows = _flat(self.phi)
        return rows @ (active @ rows)

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " features"]:
        """Σ_k a_k φ_W,k over all groups."""
        assert self.phi is not None
        return active @ self.phi.flatten(1)

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """‖φ_W,r‖ of every row, over all groups."""
        assert self.phi is not None
        norms: Tensor = torch.linalg.vector_norm(_flat(self.phi), dim=1)
        return norms

    def _tensors(self) -> dict[str, Tensor]:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def _with(self, tensors: dict[str, Any]) -> "DenseFeatures":
        return replace(self, **tensors)

    def columns(self) -> Float[Tensor, "rows groups n_columns"]:
        """Φ itself, with the bias's feature as its last column."""
        if self.bias is None:
            assert self.phi is not None
            return self.phi
        assert self._column is not None
        column = self._column[..., None]
        if self.phi is None:
            return column
        return torch.cat([self.phi, column.expand(-1, self.phi.shape[1], 1)], dim=2)


def _lies_across(phi: Float[Tensor, "rows groups n_feat"]) -> bool:
    """Whether the groups of a feature, not the features of a group, are neighbours in memory."""
    return phi.stride(1) < phi.stride(2)


def _flat(phi: Float[Tensor, "rows groups n_feat"]) -> Float[Tensor, "rows features"]:
    """All features of each row, in the order in which they lie in memory: no copy."""
    return (phi.mT if _lies_across(phi) else phi).flatten(1)


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

    @property
    def groups(self) -> int:
        """One table."""
        return 1

    def scale(self) -> Float[Tensor, "rows 1"]:
        """1 for every token that is trained."""
        return self.trained[:, None]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"]:
        """The weight's rows."""
        return weight[self.token].to(self.trained.dtype)

    def by_bias(self, bias: Tensor) -> None:
        """An embedding has no bias."""

    def squared(self) -> "OneHotFeatures":
        """Ones stay ones."""
        return self

    def restrict(self, *, weight: bool, bias: bool) -> "OneHotFeatures":
        """There is only the weight."""
        return self

    def mean_products(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """How often the row's token comes among the active rows."""
        return self.weight_sum(active)[self.token] * self.trained

    def weight_sum(self, active: Float[Tensor, " rows"]) -> Float[Tensor, " vocabulary"]:
        """How often each token comes."""
        weights = active * self.trained
        return weights.new_zeros(self.vocabulary).index_add_(0, self.token, weights)

    def weight_norms(self) -> Float[Tensor, " rows"]:
        """1 for every token that is trained."""
        return self.trained

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
