"""The corrected maps as pure functions of (input, weight, bias).

Notation of G. Bird, "The Affine Divergence" (arXiv 2512.22247): x is one row of the input, W and b
the weight and bias, s the row's divisor. The *scale* of a row is ‖φ‖², where φ multiplies [W | b]
in the row's output. A plain gradient step moves the row by −η·scale times its own gradient. The
corrections make the scale the same for every row.
"""

from jaxtyping import Float
from torch import Tensor

from adiv_layers.forms import affine_like, norm_like
from adiv_layers.gradient_only import gradient_only_linear
from adiv_layers.gradient_only_conv import gradient_only_conv
from adiv_layers.ops import unit_rows
from adiv_layers.patch_norm import patch_norm_conv
from adiv_layers.scaled_linear import scaled_linear

__all__ = [
    "affine_like_linear",
    "gradient_only_conv",
    "gradient_only_linear",
    "l2_norm",
    "norm_like_linear",
    "patch_norm_conv",
]


def affine_like_linear(
    input: Float[Tensor, "*rows n_in"],
    weight: Float[Tensor, "n_out n_in"],
    bias: Float[Tensor, " n_out"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Float[Tensor, "*rows n_out"]:
    """Apply an affine map, divided by the norm of its own features.

    z = (αWx + βb) / s, s = √(α²‖x‖² + β²) (eqns 15, 19, 37). With a bias the scale is exactly 1;
    without one it is α²‖x‖²/s², below 1.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        alpha: weight of Wx; not 0.
        beta: weight of b; not 0.

    Returns:
        (..., n_out). Zero rows give b (−b for β < 0).

    Raises:
        ValueError: alpha or beta is 0 or not finite, or one is 1e18 times the other.
    """
    return scaled_linear(input, weight, bias, affine_like(alpha, beta))


def norm_like_linear(
    input: Float[Tensor, "*rows n_in"],
    weight: Float[Tensor, "n_out n_in"],
    bias: Float[Tensor, " n_out"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    eps: float = 1e-12,
) -> Float[Tensor, "*rows n_out"]:
    """Apply an affine map to the direction of every row, without its norm.

    z = αWx/s + βb. For |β| < 1, s = √(α²‖x‖²/(1−β²)) (eqns 14, 35): scale 1 (1−β² without a bias).
    For |β| = 1, s = ‖x‖ (eqn 17): scale α²+β², 2 by default, hence half the learning rate.

    Args:
        input: (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        alpha: weight of Wx; not 0. For |β| < 1 only its sign matters, its size cancels.
        beta: weight of b, in [−1, 1].
        eps: smallest norm to divide by.

    Returns:
        (..., n_out). Zero rows give βb.

    Raises:
        ValueError: alpha is 0 or not finite, beta is outside [−1, 1], or eps is not positive.
    """
    return scaled_linear(input, weight, bias, norm_like(alpha, beta, eps, input.dtype))


def l2_norm(
    input: Float[Tensor, "*shape"], dim: int = -1, eps: float = 1e-12
) -> Float[Tensor, "*shape"]:
    """Scale rows to norm one: x / max(‖x‖, eps), a normaliser without parameters.

    Args:
        input: any shape.
        dim: the dimension that holds a row.
        eps: smallest norm to divide by.

    Returns:
        A tensor with the input's shape. Zero rows stay zero.
    """
    form = norm_like(1.0, 1.0, eps, input.dtype)
    if dim in (-1, input.dim() - 1):
        return unit_rows(input, form)[0]
    return unit_rows(input.movedim(dim, -1), form)[0].movedim(-1, dim)
