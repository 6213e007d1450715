"""The log-alignment ratio and equivalent quantities in other units.

A(W, z) = log_n [ RMS(W z) / (RMS(W) RMS(z)) ], n the fan-in (Everett et al. 2024,
arXiv 2407.05872). 1: every row of W points along every z. ½: W and z are independent. It is never
above 1.
With W = U S Vᵀ, p the shares of S² and q those of z along V: A = 1 + ½ log_n Σ p q.
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
    least = NEGLIGIBLE**2
    if fan_in < 2 or denominator <= least * scale or numerator <= least * denominator:
        return None
    return math.log(numerator / denominator) / (2 * math.log(fan_in))


def log_alignment(
    weight: Float[Tensor, "out n"], z: Float[Tensor, "rows n"], *, fan_in: int | None = None
) -> float | None:
    """Return A(W, z) of a matrix and a batch; None where it is undefined (W z = 0).

    The squares are summed in float64.

    Args:
        weight: W.
        z: the inputs.
        fan_in: the base of the logarithm, if it is not n.
    """
    product = z @ weight.t()
    numerator, of_weight, of_input = (
        float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 / x.numel()
        for x in (product, weight, z)
    )
    denominator = of_weight * of_input
    return log_ratio(numerator, denominator, fan_in or weight.shape[1], denominator)


def kappa(ratio: float | None, fan_in: int) -> float | None:
    """κ = n^(A − 1), 0 to 1: RMS(W z) as a share of its value at full alignment.

    Less than full alignment at one width is mostly due to this constant, which does not change with
    the width, while the exponent A does: transfer κ to another width, never A.
    """
    return None if ratio is None else float(fan_in ** (ratio - 1))


def effective_rank(ratio: float | None, fan_in: int) -> float | None:
    """K = n^(2(1 − A)) = 1/κ² ≥ 1: number of directions over which W and z spread equally."""
    return None if ratio is None else float(fan_in ** (2 * (1 - ratio)))
