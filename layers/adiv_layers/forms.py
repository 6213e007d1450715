"""The meaning of α, β and eps for the divisor of a row, as checked plain numbers."""

import math
from typing import NamedTuple, overload

import torch
from torch import Tensor

_LEAST, _MOST = 1e-18, 1e18  # their squares can still be added to those of a row in float32


class Correction(NamedTuple):
    """The effect of a structural form on Wφ and b, where φ is a row or a patch.

    z = f·(Wφ + shift·b), f = gain/√(‖φ‖² + constant), if constant > 0 (affine-like);
    z = f·Wφ + shift·b, f = gain/max(‖φ‖, eps), if constant is 0 (norm-like).
    """

    gain: float
    shift: float
    constant: float
    eps: float

    def limit(self, dtype: torch.dtype) -> float:
        """Return the |f| from which eps determines f, so that it does not depend on φ; 0: none."""
        if self.constant > 0:
            return 0.0
        return float(abs(self.gain) * (1.0 - 1e-6) / least_square(self.eps, dtype) ** 0.5)

    def split(self, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the parts of the bias that are added before and after the product with f."""
        shifted = times(bias, self.shift)
        return (shifted, None) if self.constant > 0 else (None, shifted)


_UNIT = Correction(1.0, 1.0, 1.0, 1.0)


def affine_like(alpha: float, beta: float) -> Correction:
    """Return the form (αWφ + βb)/√(α²‖φ‖² + β²) = f·(Wφ + β/α·b), f = ±1/√(‖φ‖² + (β/α)²)."""
    if alpha == 1.0 == beta:  # keeps plain numbers where torch.compile makes settings symbolic
        return _UNIT
    offset, sign = affine_like_constants(alpha, beta)
    return Correction(sign, sign * offset, offset * offset, 1.0)


def norm_like(alpha: float, beta: float, eps: float, dtype: torch.dtype) -> Correction:
    """Return the form αWφ/s + βb: see `norm_like_gain`."""
    return Correction(norm_like_gain(alpha, beta), beta, 0.0, representable(eps, dtype))


def affine_like_constants(alpha: float, beta: float) -> tuple[float, float]:
    """Return offset and sign of (αWx + βb)/√(α²‖x‖² + β²).

    It equals (sign·Wx + offset·b)/√(‖x‖² + offset²).

    Raises:
        ValueError: alpha or beta is out of range.
    """
    if not (0.0 < abs(alpha) < math.inf and 0.0 < abs(beta) < math.inf):
        raise ValueError(
            f"affine-like: alpha={alpha}, beta={beta}; both must be finite and not 0. "
            "To do without the bias pass bias=None, or use the norm-like form."
        )
    offset = beta / abs(alpha)
    if not _LEAST <= abs(offset) <= _MOST:
        raise ValueError(
            f"affine-like: alpha={alpha}, beta={beta}; |beta/alpha| must be in "
            f"[{_LEAST}, {_MOST}], or its square is lost in float32."
        )
    return offset, 1.0 if alpha > 0.0 else -1.0


def norm_like_gain(alpha: float, beta: float) -> float:
    """Return the factor of W x/‖x‖ in the norm-like form: ±√(1−β²), or α if |β| = 1."""
    if alpha == 1.0 == beta:
        return 1.0
    if not (0.0 < abs(alpha) < math.inf and abs(beta) <= 1.0):
        raise ValueError(
            f"norm-like: alpha={alpha}, beta={beta}; "
            "alpha must be finite and not 0, beta must be in [-1, 1]."
        )
    if abs(beta) == 1.0:
        return alpha
    gain: float = (1.0 - beta * beta) ** 0.5
    return gain if alpha > 0.0 else -gain


def check_form(form: str, alpha: float, beta: float, eps: float) -> None:
    """Raise ValueError unless the structural form is known and its settings are in range."""
    if form == "affine-like":
        affine_like_constants(alpha, beta)
    elif form == "norm-like":
        norm_like_gain(alpha, beta)
        representable(eps, torch.float32)
    else:
        raise ValueError(f'form is {form!r}; must be "affine-like" or "norm-like".')


def representable(eps: float, dtype: torch.dtype) -> float:
    """Return the eps for a dtype, not below its tiny: fp16 gradients would be infinite."""
    if not eps > 0.0:
        raise ValueError(f"eps={eps}; must be positive, or zero rows have no finite gradient.")
    tiny = torch.finfo(dtype).tiny
    return eps if eps > tiny else tiny


def least_square(eps: float, dtype: torch.dtype) -> float:
    """Return the smallest ‖x‖² to divide by: eps², or more if the dtype would flush it to zero."""
    least, tiny = eps * eps, torch.finfo(dtype).tiny
    return least if least > tiny else tiny


@overload
def times(parameter: Tensor, factor: float) -> Tensor: ...
@overload
def times(parameter: None, factor: float) -> None: ...
def times(parameter: Tensor | None, factor: float) -> Tensor | None:
    """Return a weight or bias multiplied by a factor; None for None."""
    return parameter if parameter is None or factor == 1.0 else parameter * factor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, and float64 for float64.

    Raises:
        TypeError: the dtype is complex.
    """
    if dtype.is_complex:
        raise TypeError(f"adiv_layers: input has dtype {dtype}; must be real.")
    return torch.float64 if dtype == torch.float64 else torch.float32
