"""What one pass over a layer's input says of *all* its rows, where such a pass is cheap.

Rows are sampled only for what can't be had so (spec, "From sampled rows to the layer").
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from adiv_monitor.features.rows import exact, exact_type, joined
from adiv_monitor.kernels.choice import attempt

CHUNK = 2**19  # entries of a temporary square: stays in a CPU's cache


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
        return replace(
            self,
            weight_square=self.weight_square if weight else None,
            bias_square=self.bias_square if bias else 0.0,
            weight_sum=self.weight_sum if weight else None,
        )


def squares(x: Tensor, dim: int = -1) -> Tensor:
    """Σ x² over one dimension, in the precision of the measures; no copy of x as a whole."""
    dim %= x.dim()
    seen = attempt("look", x.movedim(dim, -1), squares=True)
    if seen is not None:
        of_rows: Tensor = seen[0]
        return of_rows.view(x.shape[:dim] + x.shape[dim + 1 :])
    if x.is_cuda or x.stride(dim) == 1 or x.dim() < 3:
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=exact_type(x))
        return norms.square()
    # A CPU takes norms across memory entry by entry: six times slower than squares and sums.
    samples = max(1, CHUNK * len(x) // max(x.numel(), 1))
    parts = [exact(part).square().sum(dim) for part in torch.split(x, samples)]
    return joined(parts)


def squares_and_sum(rows: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, " rows"], Tensor]:
    """Σ x² of every row, and the sum of all rows."""
    seen = attempt("look", rows, squares=True, sums=True)
    if seen is not None:
        return seen[0], seen[1]
    return squares(rows), rows.sum(0, dtype=exact_type(rows))
