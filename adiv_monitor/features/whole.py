"""What one pass over a layer's input says of *all* its rows, where such a pass is cheap.

Rows are sampled only for what can't be had so (spec, "From sampled rows to the layer").
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import compute_dtype, joined, to_compute_dtype
from adiv_monitor.kernels.choice import attempt

CHUNK = 2**17  # entries of a temporary square: stays in a CPU's cache


@dataclass(frozen=True)
class Whole:
    """Scales of all rows of one call, and the sum of their features.

    Attributes:
        weight_square: ‖φ_W‖² of every row; None: not trained.
        bias_square: φ_b² of every row, or one number for all of them; 0 without a trained bias.
        weight_sum: Σ_r φ_W,r, in any shape; None where that would take more than a pass.
        trained: 0 for rows that nothing trains (padding tokens), which count as idle, else 1; None:
            all are.
    """

    weight_square: Float[Tensor, " rows"] | None
    bias_square: Float[Tensor, " rows"] | float
    weight_sum: Tensor | None
    trained: Float[Tensor, " rows"] | None = None

    def restrict(self, *, weight: bool, bias: bool) -> "Whole":
        """Of the trained parameters alone."""
        if weight and bias:
            return self
        return replace(
            self,
            weight_square=self.weight_square if weight else None,
            bias_square=self.bias_square if bias else 0.0,
            weight_sum=self.weight_sum if weight else None,
        )


class LateScales:
    """Scales of all rows and groups of one call, as many as activations: made with the gradient.

    They read what autograd keeps until then for the gradient of the weight, so that keeping it
    takes no memory of its own. Not where hooks decide what is kept (checkpointing, offloading), nor
    of what was written to since.

    Args:
        make: gives ‖φ_W‖², (rows, groups) in the layout of z, of the tensors that it reads: part
            after part, so that what lies between stays in a CPU's cache.
        reads: those.
        bias_square: φ_b²; 0 without a bias.
    """

    def __init__(
        self, make: Callable[..., Iterable[Tensor]], reads: Sequence[Tensor], bias_square: float
    ) -> None:
        self._make = make
        self._reads = [tensor.detach() for tensor in reads]  # a graph would be kept alive
        self._versions = [tensor._version for tensor in self._reads]
        self._bias_square = bias_square

    @property
    def may_be_kept(self) -> bool:
        """Whether what is read stays in memory in any case."""
        return not hooks_keep()

    def of_gradient(
        self, gradient: Float[Tensor, "*rows channels"], *, bias: bool
    ) -> Float[Tensor, "3 rows"] | None:
        """Σ_i g_ri², Σ_i s_ri g_ri² and Σ_i s_ri² g_ri² of every row; None: not known any more.

        Args:
            gradient: of all rows.
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
            # No copy in another order of memory: the sums are several times faster in their own.
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
    """The samples of a tensor, in parts that stay in a CPU's cache; of its last dimensions, all."""
    if x.is_cuda or x.dim() <= together or x.numel() <= CHUNK:
        return (x,)
    return torch.split(x, max(1, CHUNK * len(x) // x.numel()))


def hooks_keep() -> bool:
    """Whether hooks hold what autograd keeps: to hand it out they may run a forward pass again."""
    holders: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return holders is None or holders(True) is not None  # torch 2.6 does not tell


def squares(x: Tensor, dim: int = -1) -> Tensor:
    """Σ x² over one dimension, in the precision of the measures; no copy of x as a whole."""
    dim %= x.dim()
    seen = attempt("look", x.movedim(dim, -1), squares=True)
    if seen is not None:
        of_rows: Tensor = seen[0]
        return of_rows.view(x.shape[:dim] + x.shape[dim + 1 :])
    if x.is_cuda or x.stride(dim) == 1 or x.dim() < 3:
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=compute_dtype(x))
        return norms.square()
    # A CPU takes norms across memory entry by entry: six times slower than squares and sums.
    return joined([to_compute_dtype(part).square().sum(dim) for part in in_parts(x)])


def squares_and_sum(rows: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, " rows"], Tensor]:
    """Σ x² of every row, and the sum of all rows."""
    seen = attempt("look", rows, squares=True, sums=True)
    if seen is not None:
        return seen[0], seen[1]
    return squares(rows), rows.sum(0, dtype=compute_dtype(rows))
