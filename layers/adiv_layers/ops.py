"""The rows that the corrected layers multiply by: x̂ = r·x and r, with r = 1/√(‖x‖² + constant)."""

import torch
from torch import Tensor

__all__ = ["unit_rows"]


def unit_rows(x: Tensor, constant: float, eps: float = 1e-12) -> tuple[Tensor, Tensor]:
    """Rows of unit scale and the factor that made them so.

    x̂ = r·x with r = 1/√(‖x‖² + constant) for constant > 0 (affine-like, eqn 19: constant = 1),
    and r = 1/max(‖x‖, eps) for constant = 0 (norm-like, eqn 17; x̂ = 0 at x = 0).

    Args:
        x: rows, shape (..., features).
        constant: what is added to the squared norm, at least 0.
        eps: the smallest norm that is divided by; used where constant is 0.

    Returns:
        x̂, shape (..., features), in the dtype of x or, under autocast, the autocast dtype;
        r, shape (..., 1), in float32 (float64 for float64), as is every sum within.
    """
    r = _inverse_norm(x, constant, eps)
    return (r * x.to(r.dtype)).to(_output_dtype(x)), r


def _inverse_norm(x: Tensor, constant: float, eps: float) -> Tensor:
    """The factor r of `unit_rows`, in the accumulation dtype."""
    wide = x.to(_wide(x.dtype))
    square = (wide * wide).sum(-1, keepdim=True)
    if constant > 0:
        return (square + constant).rsqrt()
    # Clamping the square, not the norm: the derivatives of a norm are not finite at zero.
    return square.clamp_min(_floor(eps, wide.dtype)).rsqrt()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _floor(eps: float, dtype: torch.dtype) -> float:
    """eps², kept above what the dtype would flush to zero."""
    return max(eps * eps, torch.finfo(dtype).tiny)


def _output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x̂: as autocast, which leaves float64 alone, would have it."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
