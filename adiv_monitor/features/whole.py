"""Scales and feature sums of *all* rows of a layer, from one cheap pass over its input.

Rows are sampled only for measures that need more (spec, "From sampled rows to the layer").
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import compute_dtype, joined, to_compute_dtype

CHUNK = 2**17  # entries of a temporary square, so that it stays in a CPU's cache


@dataclass(frozen=True)
class Whole:
    """Scales of all rows of one call, and the sum of their features.

    Attributes:
        weight_square: ‖φ_W‖² of every row; None if the weight is not trained.
        bias_square: φ_b² of every row, or one number for all rows; 0 without a trained bias.
        weight_sum: Σ_r φ_W,r, in any shape; None where it would take more than one pass.
        trained: 0 for rows without trained weights (padding tokens), which count as zero-gradient
            rows, else 1; None if all are trained.
    """

    weight_square: Float[Tensor, " rows"] | None
    bias_square: Float[Tensor, " rows"] | float
    weight_sum: Tensor | None
    trained: Float[Tensor, " rows"] | None = None

    def restrict(self, *, weight: bool, bias: bool) -> "Whole":
        """Return the scales and the feature sum for the trained parameters alone."""
        if weight and bias:
            return self
        return replace(
            self,
            weight_square=self.weight_square if weight else None,
            bias_square=self.bias_square if bias else 0.0,
            weight_sum=self.weight_sum if weight else None,
        )


class LateScales:
    """Scales of all rows and groups of one call, computed only when the gradient arrives.

    There are as many scales as activations. They are computed from tensors that autograd keeps for
    the weight's gradient anyway, so they take no extra memory until then. This does not work where
    hooks decide what is kept (checkpointing, offloading), or after writes to these tensors.

    Args:
        make: computes ‖φ_W‖², (rows, groups) in the layout of z, from the tensors, part by part, so
            that temporaries stay in a CPU's cache.
        reads: the tensors.
        bias_square: φ_b²; 0 without a bias.
    """

    def __init__(
        self, make: Callable[..., Iterable[Tensor]], reads: Sequence[Tensor], bias_square: float
    ) -> None:
        self._make = make
        self._reads = [tensor.detach() for tensor in reads]  # a graph would be kept alive
        self._versions = [tensor._version for tensor in self._reads]
        self._bias_square = bias_square

    def of_gradient(
        self, gradient: Float[Tensor, "*rows channels"], *, bias: bool
    ) -> Float[Tensor, "3 rows"] | None:
        """Return Σ_i g_ri², Σ_i s_ri g_ri² and Σ_i s_ri² g_ri² of every row.

        None if the tensors were written to since.

        Args:
            gradient: the gradient of all rows.
            bias: whether the bias is trained.
        """
        if [tensor._version for tensor in self._reads] != self._versions:
            return None
        found, end = [], 0
        by_entry = gradient.view(1, -1) if gradient.dim() == 1 else gradient
        positions = prod(by_entry.shape[1:-1])
        for scale in self._make(*self._reads):
            start, end = end, end + scale.shape[:-1].numel() // max(positions, 1)
            part = to_compute_dtype(by_entry[start:end])
            groups = scale.shape[-1]
            # The sums are several times faster in memory order, without a copy into another one.
            scale = scale.reshape(*part.shape[:-1], groups)
            if bias and self._bias_square:
                scale = scale + self._bias_square
            own = part.square()
            if groups < part.shape[-1]:
                own = own.view(*own.shape[:-1], groups, own.shape[-1] // groups).sum(-1)
            sums = [own.sum(-1)]
            for _ in range(2):
                own = own.mul_(scale)
                sums.append(own.sum(-1))
            found.append(torch.stack(sums).flatten(1))
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def in_parts(x: Tensor, together: int = 1) -> Sequence[Tensor]:
    """Split a tensor along its samples into parts that stay in a CPU's cache.

    A tensor with at most `together` dimensions, or on a GPU, is not split.
    """
    if x.is_cuda or x.dim() <= together or x.numel() <= CHUNK:
        return (x,)
    return torch.split(x, max(1, CHUNK * len(x) // x.numel()))


def hooks_keep() -> bool:
    """Whether saved-tensor hooks are active; unpacking may then rerun a forward pass."""
    holders: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return holders is None or holders(True) is not None  # torch 2.6 lacks the function


def squares(x: Tensor, dim: int = -1) -> Tensor:
    """Return Σ x² over one dimension in the precision of the measures, without a copy of x."""
    if x.shape[dim] == 1:  # as of each channel of a depthwise convolution
        return to_compute_dtype(x).square().squeeze(dim)
    if x.dim() < 3 or x.is_cuda or x.stride(dim) == 1:
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=compute_dtype(x))
        return norms.square()
    # On a CPU, norms over a strided dimension are six times slower than squares and sums.
    return joined([to_compute_dtype(part).square().sum(dim) for part in in_parts(x)])


def squares_and_sum(rows: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, " rows"], Tensor]:
    """Return Σ x² of every row, and the sum of all rows."""
    return squares(rows), rows.sum(0, dtype=compute_dtype(rows))
