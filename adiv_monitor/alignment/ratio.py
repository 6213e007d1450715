"""The log-alignment ratio and equivalent quantities in other units.

A(W, z) = log_n [ RMS(W z) / (RMS(W) RMS(z)) ], n the fan-in (Everett et al. 2024,
arXiv 2407.05872). 1: every row of W points along every z. ½: W and z are independent. It is never
above 1.
With W = U S Vᵀ, p the shares of S² and q those of z along V: A = 1 + ½ log_n Σ p q.

Beside it the spectral alignment ‖W z‖ / (‖W‖₂ ‖z‖), ‖W‖₂ the largest singular value: the ratio that
Yang, Simon & Bernstein 2023 (arXiv 2310.17813) show to be of order one for weights and updates. It
is 1 if every z is along the directions that W amplifies most, whatever the rank of W: it equals κ
times the root of the stable rank ‖W‖²_F / ‖W‖₂².
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# A ratio is undefined if its denominator is below this share of that at the reference point.
NEGLIGIBLE = 1e-12


def log_ratio(numerator: float, denominator: float, fan_in: int, scale: float) -> float | None:
    """Return A from mean squares; None if numerator or denominator is negligible.

    Args:
        numerator: mean square of W z.
        denominator: mean square of W times mean square of z.
        fan_in: n, above 1.
        scale: the denominator at the reference point.
    """
    ratio = root_ratio(numerator, denominator, scale)
    return None if fan_in < 2 or ratio is None else math.log(ratio) / math.log(fan_in)


def log_alignment(weight: Float[Tensor, "out n"], z: Float[Tensor, "rows n"]) -> float | None:
    """Return A(W, z) of a matrix and a batch; None where it is undefined (W z = 0).

    The squares are summed in float64.

    Args:
        weight: W.
        z: the inputs.
    """
    if not (weight.numel() and z.numel()):
        return None
    product = z @ weight.t()
    numerator, of_weight, of_input = (
        float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 / x.numel()
        for x in (product, weight, z)
    )
    denominator = of_weight * of_input
    return log_ratio(numerator, denominator, weight.shape[1], denominator)


def largest_singular(matrices: Float[Tensor, "*batch out n"]) -> Float[Tensor, "*batch"]:
    """Return the largest singular value of each matrix, by the eigenvalues of W Wᵀ or Wᵀ W.

    It is NaN for a matrix that is not finite.
    """
    transposed = matrices.mT
    small = matrices if matrices.shape[-2] <= matrices.shape[-1] else transposed
    squares = small @ small.mT
    is_finite = squares.isfinite().all(-1).all(-1)
    largest: Tensor = torch.linalg.eigvalsh(squares.nan_to_num(0.0, 0.0, 0.0))[..., -1]
    return largest.clamp(min=0).sqrt().where(is_finite, torch.nan)


def root_ratio(numerator: float, denominator: float, scale: float) -> float | None:
    """Return √(numerator / denominator) of squares; None if one is negligible or not finite.

    Args:
        numerator: of W z.
        denominator: of the product of the norms of W and z.
        scale: the denominator at the reference point.
    """
    least = NEGLIGIBLE**2
    is_known = least * scale < denominator < math.inf and least * denominator < numerator < math.inf
    return math.sqrt(numerator / denominator) if is_known else None


def kappa(ratio: float | None, fan_in: int) -> float | None:
    """κ = n^(A − 1), 0 to 1: RMS(W z) as a share of its value at full alignment.

    Less than full alignment at one width is mostly due to this constant, which does not change with
    the width, while the exponent A does: transfer κ to another width, never A.
    """
    return None if ratio is None else float(fan_in ** (ratio - 1))


def effective_rank(ratio: float | None, fan_in: int) -> float | None:
    """K = n^(2(1 − A)) = 1/κ² ≥ 1: number of directions over which W and z spread equally."""
    return None if ratio is None else float(fan_in ** (2 * (1 - ratio)))
