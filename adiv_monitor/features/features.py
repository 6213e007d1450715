"""The features φ of a layer's rows, with which its output is linear in its parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adiv_monitor.features.rows import squares as row_squares

F = TypeVar("F", bound="Features")


class Features:
    """φ of some rows; Θ = [W | b], z = Θφ. By default there is one group, and only the weight.

    A subclass is a dataclass whose tensors have one entry per row, or defines `pick` and `joined`.

    Attributes:
        form: equal for features of layers that `stacked` can stack; None: it can't.
    """

    form: object = None

    @property
    def groups(self) -> int:
        """Number of groups, which are independent layers."""
        return 1

    def scale(self) -> Float[Tensor, "rows groups"] | None:
        """Return ‖φ_r‖² of every row and group, the diagonal of M = ΦΦᵀ; None if undefined."""
        return None

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return Φ_W Wᵀ for a tensor shaped like the weight; None if the weight is not trained."""
        raise NotImplementedError(f"{type(self).__name__} must define by_weight")

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return φ_b ⊗ b for a tensor shaped like the bias; None if there is no trained bias."""
        return None

    def move(
        self, weight: Tensor | None, bias: Tensor | None, out: Tensor | None = None
    ) -> Float[Tensor, "rows n_total"]:
        """Return Φ_W Wᵀ + φ_b ⊗ b, for a tensor shaped like the weight and one like the bias.

        Args:
            weight: the first; None: no weight is trained.
            bias: the second; None: no bias is trained.
            out: written to; None: new memory.
        """
        of_weight = None if weight is None else self.by_weight(weight)
        of_bias = None if bias is None else self.by_bias(bias)
        if of_weight is None or of_bias is None:
            lone = of_bias if of_weight is None else of_weight
            assert lone is not None
            return lone if out is None else out.copy_(lone)
        return torch.add(of_weight, of_bias, out=out)

    @property
    def width(self) -> int | None:
        """Number of features that an output's weights multiply; None: not a matrix of these."""
        return None

    def matrix(self, weight: Tensor) -> Float[Tensor, "width n_out"]:
        """Return the weight of one group with a column for each output, as that of a table is."""
        return weight

    def restrict(self, *, weight: bool, bias: bool) -> "Features":
        """Return the features of the trained parameters alone."""
        return self

    def pick(self: F, rows: Tensor) -> F:
        """Return the features of some of the rows."""
        tensors = {name: tensor.index_select(0, rows) for name, tensor in self._tensors.items()}
        return self._with(tensors)

    def joined(self: F, others: Sequence[Any]) -> F:
        """Return the features of these rows and those of other calls of the same layer."""
        return self._made(others, torch.cat) if others else self

    def _with(self: F, tensors: dict[str, Any]) -> F:
        return replace(self, **tensors)  # type: ignore[type-var]

    @property
    def _tensors(self) -> dict[str, Any]:
        """The fields that have one entry per row."""
        fields = getattr(self, "__dataclass_fields__", ())  # not `_squares`, which is kept beside
        return {k: x for k, x in vars(self).items() if k in fields and isinstance(x, Tensor)}

    @property
    def size(self) -> int:
        """The number of entries of its tensors."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    def stacked(self: F, others: Sequence[Any]) -> F:
        """Return the features of several layers: tensors get a first dimension of layers."""
        return self._made(others, torch.stack if others else lambda parts: parts[0][None])

    def _made(self: F, others: Sequence[Any], make: Callable[[list[Tensor]], Tensor]) -> F:
        parts = [vars(features) for features in (self, *others)]
        return self._with({name: make([p[name] for p in parts]) for name in self._tensors})

    def common(self, active: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor] | None:
        """Return φ_W,r·Σ_k a_k φ_W,k and ‖φ_W,r‖² of every row; None if they are not known."""
        return None


@dataclass(frozen=True)
class JacobianFeatures(Features):
    """Features of rows that are not linear in the parameters: Δz_r = J_r ΔΘ is known, but no Φ.

    Attributes:
        jacobian: a change of the parameters, as one vector (P,) → the rows' move (rows, n_total).
    """

    jacobian: Callable[[Tensor], Tensor]

    def by_weight(self, weight: Tensor) -> Tensor:
        """Return J_r Θ for a vector of parameters."""
        return self.jacobian(weight)

    def pick(self, rows: Tensor) -> "JacobianFeatures":
        """Return the features of some of the rows."""
        return JacobianFeatures(lambda vector: self.jacobian(vector).index_select(0, rows))

    def joined(self, others: Sequence[Any]) -> "JacobianFeatures":
        """Return the features of these rows and those of other calls of the same layer."""
        every = (self, *others)
        return JacobianFeatures(lambda vector: torch.cat([x.jacobian(vector) for x in every]))


@dataclass(frozen=True)
class DenseFeatures(Features):
    """Features that are vectors of numbers.

    Those of several layers may be stacked; then all tensors, arguments and results have a first
    dimension of layers.

    Attributes:
        phi: (rows, groups, n_feat), the features that the weight multiplies. The weight is read as
            (groups, n_out, n_feat), torch's layout of linear, grouped convolution and gain weights.
        bias: the feature φ_b that the bias multiplies: one number for all rows (mostly 1), or
            (rows, groups) or (rows, 1) for all groups; None without a bias.
        transposed: the weight is stored (n_feat, n_out) instead.
        weight_gain: (rows, groups), factor by which the layer's backward pass multiplies a row's
            part of the weight's gradient (gradient-only layers); None: 1.
        bias_gain: (rows, groups), the same factor for the bias's gradient; None: 1.
        mixes_rows: the layer's backward pass mixes the rows (gradient-only, batch), so that single
            rows have no scale.
    """

    phi: Float[Tensor, "rows groups n_feat"] | None
    bias: Float[Tensor, "rows groups_or_1"] | float | None = None
    transposed: bool = False
    weight_gain: Float[Tensor, "rows groups"] | None = None
    bias_gain: Float[Tensor, "rows groups"] | None = None
    mixes_rows: bool = False

    def __post_init__(self) -> None:
        if self.phi is None and not isinstance(self.bias, Tensor):
            got = f"got phi=None and bias={self.bias}"
            raise ValueError(f"DenseFeatures: {got}, expected phi, or a bias (rows, 1) of all")
        for name, tensor in self._tensors.items():
            dims = 3 if name == "phi" else 2
            if tensor.ndim not in (dims, dims + 1):
                raise ValueError(
                    f"DenseFeatures({name}=…): got shape {tuple(tensor.shape)}, expected {dims} "
                    "dimensions (rows, groups, …); a plain layer is one group: use x[:, None]"
                )

    @property
    def form(self) -> object:  # type: ignore[override]
        """Equal for features with tensors of the same shapes, dtypes and devices."""
        every = self.phi, self.bias, self.weight_gain, self.bias_gain
        of = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in every]
        return (self.transposed, self.mixes_rows, *of)

    @property
    def groups(self) -> int:
        """Number of groups, which are independent layers."""
        if self.phi is not None:
            return self.phi.shape[-2]
        return self.bias.shape[-1] if isinstance(self.bias, Tensor) else 1

    def scale(self) -> Float[Tensor, "rows groups"] | None:
        """Return ‖φ_r‖² including the bias's feature and the gains; None if rows are mixed."""
        if self.mixes_rows:
            return None
        parts: list[Any] = []
        if self.phi is not None:
            own = self._squares
            parts.append(own if self.weight_gain is None else own * self.weight_gain)
        if self.bias is not None:
            square: Tensor | float = self.bias**2
            parts.append(square if self.bias_gain is None else square * self.bias_gain)
        found: Tensor = parts[0] + parts[1] if len(parts) == 2 else parts[0]
        return found

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return Φ_W Wᵀ, group by group."""
        if self.phi is None:
            return None
        groups, n_feat = self.phi.shape[-2:]
        if groups == 1:
            return self.phi.squeeze(-2) @ self.matrix(weight)
        blocks = weight.to(self.phi.dtype).reshape(*self.phi.shape[:-3], groups, -1, n_feat)
        if blocks.shape[-2] > 1:
            return torch.einsum("...rgp,...gnp->...rgn", self.phi, blocks).flatten(-2)
        each = blocks.movedim(-2, -3)  # one output of each group: a gain, a depthwise convolution
        return (self.phi * each).squeeze(-1) if n_feat == 1 else (self.phi * each).sum(-1)

    def matrix(self, weight: Tensor) -> Float[Tensor, "width n_out"]:
        """Return the weight of one group with a column for each output."""
        assert self.phi is not None
        weight = weight.to(self.phi.dtype)
        if self.transposed:
            return weight
        return weight.reshape(*self.phi.shape[:-3], -1, self.phi.shape[-1]).mT

    def move(
        self, weight: Tensor | None, bias: Tensor | None, out: Tensor | None = None
    ) -> Float[Tensor, "rows n_total"]:
        """Return Φ_W Wᵀ + φ_b ⊗ b; see `Features.move`."""
        phi, is_one = self.phi, not isinstance(self.bias, Tensor) and self.bias == 1
        if phi is None or weight is None or phi.dim() == 3 or (bias is not None and not is_one):
            return super().move(weight, bias, out)
        row = None if bias is None else bias.reshape(len(phi), 1, -1).to(phi.dtype)
        if phi.shape[2] == 1:
            product = torch.bmm if row is None else partial(torch.baddbmm, row)
            return product(phi.squeeze(2), self.matrix(weight), out=out)
        if row is not None and phi.shape[3] == 1 and weight.numel() == row.numel():  # a gain
            of_weight = weight.reshape(row.shape).to(phi.dtype)
            return torch.addcmul(row, phi.squeeze(3), of_weight, out=out)
        return super().move(weight, bias, out)

    def by_bias(self, bias: Tensor) -> Float[Tensor, "rows n_total"] | None:
        """Return φ_b ⊗ b."""
        if self.bias is None:
            return None
        if not isinstance(self.bias, Tensor):
            assert self.phi is not None
            *layers, rows, _, _ = self.phi.shape
            row = bias.reshape(*layers, 1, -1).to(self.phi.dtype)
            return (row if self.bias == 1 else self.bias * row).expand(*layers, rows, -1)
        *layers, _, groups = self.bias.shape
        blocks = bias.reshape(*layers, 1, groups, -1).to(self.bias.dtype)
        return (self.bias[..., None] * blocks).flatten(-2)

    def restrict(self, *, weight: bool, bias: bool) -> "DenseFeatures":
        """Return the features of the trained parameters alone."""
        if (weight or self.phi is None) and (bias or self.bias is None):
            return self
        return replace(self, phi=self.phi if weight else None, bias=self._column if bias else None)

    @property
    def _column(self) -> Float[Tensor, "rows groups_or_1"] | None:
        """φ_b of every row."""
        if self.bias is None or isinstance(self.bias, Tensor):
            return self.bias
        assert self.phi is not None
        return self.phi.new_full((len(self.phi), 1), self.bias)

    @property
    def width(self) -> int:
        """Number of features of a group; none without a weight."""
        return 0 if self.phi is None else self.phi.shape[-1]

    def common(self, active: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor] | None:
        """Return φ_W,r·Σ_k a_k φ_W,k and ‖φ_W,r‖² of every row, over all groups."""
        if self.phi is None:
            return None
        rows, own = self.phi.flatten(-2), self._squares
        summed = active[..., None, :] @ rows
        return (rows @ summed.mT).squeeze(-1), own[..., 0] if own.shape[-1] == 1 else own.sum(-1)

    @cached_property
    def _squares(self) -> Float[Tensor, "rows groups"]:
        """‖φ_W‖² of every row and group."""
        assert self.phi is not None
        return row_squares(self.phi)

    def columns(self) -> Float[Tensor, "rows groups n_columns"]:
        """Return Φ with the bias's feature as its last column."""
        parts = [] if self.phi is None else [self.phi]
        if self._column is not None:
            parts.append(self._column[..., None].expand(-1, self.groups, 1))
        return torch.cat(parts, 2)


@dataclass(frozen=True)
class OneHotFeatures(Features):
    """Features that select one row of the weight, as an embedding does.

    Attributes:
        token: (rows,) int64, index of the weight's row.
        trained: (rows,), 1, or 0 where that row of the weight gets no gradient (padding); the
            optimizer may still move it, for example by weight decay.
        vocabulary: number of rows of the weight.
    """

    token: Int[Tensor, " rows"]
    trained: Float[Tensor, " rows"]
    vocabulary: int

    def scale(self) -> Float[Tensor, "rows 1"]:
        """Return ‖φ_r‖²: 1 for every trained token, else 0."""
        return self.trained[:, None]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_total"]:
        """Return the weight's row of every token."""
        return weight[self.token].to(self.trained.dtype)

    def common(self, active: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Return the count of its token among the active rows, and 1; 0 of untrained tokens."""
        weights = active * self.trained
        counts = weights.new_zeros(self.vocabulary).index_add_(0, self.token, weights)
        return counts[self.token] * self.trained, self.trained

    @property
    def width(self) -> int:
        """Number of rows of the weight."""
        return self.vocabulary


@dataclass(frozen=True)
class BlockFeatures(Features):
    """Features that are a vector of numbers and the index of the block that multiplies it.

    A weight of several blocks of which every row uses one (experts, matrices of heads) is one
    layer with φ = one-hot(block) ⊗ x. No product gathers a weight per row: there is one product
    per block, over all rows.

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
        return row_squares(self.phi)[:, None]

    def by_weight(self, weight: Tensor) -> Float[Tensor, "rows n_out"]:
        """Return x_r W[block_r]ᵀ of every row."""
        moved = self.phi.new_zeros(len(self.phi), weight.shape[1])
        for block, matrix in enumerate(weight.to(self.phi.dtype)):
            moved.addmm_(self.phi * (self.block == block)[:, None], matrix.t())
        return moved

    def common(self, active: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Return x_r·Σ_k a_k x_k over the rows of the same block, and ‖x_r‖²."""
        sums = self.phi.new_zeros(self.count + 1, self.phi.shape[1])  # last: no block
        sums.index_add_(0, self.block, self.phi * active[:, None])
        return torch.linalg.vecdot(self.phi, sums[self.block]), row_squares(self.phi)
