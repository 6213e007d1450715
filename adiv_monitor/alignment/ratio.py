"""The log-alignment ratio, and what it says in other units.

A(W, z) = log_n [ RMS(W z) / (RMS(W) RMS(z)) ], n the fan-in (Everett et al. 2024,
arXiv 2407.05872). 1: every row of W points along every z. ½: they know nothing of each other. It is
never above 1.
With W = U S Vᵀ, p the shares of S² and q those of z along V: A = 1 + ½ log_n Σ p q.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Of a ratio whose denominator is below this share of that at the reference point, nothing is known.
NEGLIGIBLE = 1e-12


def log_ratio(numerator: float, denominator: float, fan_in: int, scale: float) -> float | None:
    """A from mean squares; None where nothing moves, and where nothing comes through.

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
    """A(W, z) of a matrix and a batch; None where it is undefined (W z = 0).

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
    """κ = n^(A − 1): RMS(W z) as a share of what full alignment would give, 0 to 1.

    What is less than full at one width is mostly this constant, which stays when the width grows,
    where the exponent A does not: carry κ to another width, never A.
    """
    return None if ratio is None else float(fan_in ** (ratio - 1))


def effective_rank(ratio: float | None, fan_in: int) -> float | None:
    """K = n^(2(1 − A)) = 1/κ²: over how many directions W and z are spread alike, 1 and more."""
    return None if ratio is None else float(fan_in ** (2 * (1 - ratio)))
