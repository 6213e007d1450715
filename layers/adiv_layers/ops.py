"""The operations of the corrected layers, with kernels where a GPU can run them.

Every operation is a plain PyTorch expression. For CUDA tensors it is replaced by Triton kernels
inside an autograd function. The plain expression remains for other devices, a missing or broken
Triton, `torch.compile` (which fuses it with its neighbours) and export, `torch.func` transforms,
forward-mode derivatives, tensor subclasses, and derivatives of derivatives. Sums are computed in
float32 at least, in float64 for float64.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from adiv_layers.autocast import autocast_dtype
from adiv_layers.forms import Correction, accumulation_dtype, least_square
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.maps import Patches

Plain = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def unit_rows(x: Tensor, form: Correction) -> tuple[Tensor, Tensor]:
    """Scale rows to unit scale, x̂ = f·x with f as in `Correction`; return x̂ and f.

    Args:
        x: rows, shape (..., features).
        form: gain, constant and eps of f.

    Returns:
        x̂, shape (..., features), in the dtype of x or, under autocast, the autocast dtype;
        f, shape (..., 1), in float32 (float64 for float64), as is every sum within.
    """
    if (kernels := kernels_for(x)) is not None:
        with suppress(KernelError):
            unit, factor = kernels.UnitRows.apply(x, form, linear_dtype(x))
            return unit, factor
    wide = x.to(accumulation_dtype(x.dtype))
    square = (wide * wide).sum(-1, keepdim=True)
    if form.constant > 0:
        square = square + form.constant
    else:  # clamp the square, not the norm: the derivatives of a norm are not finite at zero
        square = square.clamp_min(least_square(form.eps, square.dtype))
    factor = square.rsqrt() if form.gain == 1.0 else form.gain * square.rsqrt()
    return (factor * wide).to(linear_dtype(x)), factor


def output_scaled(
    patches: Patches, plain: Plain, x: Tensor, weight: Tensor, bias: Tensor | None, form: Correction
) -> Tensor:
    """Return f·(Wφ + shift·b) of the patches φ of x, or f·Wφ + shift·b if the constant is 0.

    Args:
        patches: definition of φ.
        plain: the same map as an expression of x, weight and bias.
        x: (batch, n_in, *space).
        weight: (n_out, n_in / groups, *kernel).
        bias: (n_out,).
        form: see `Correction`.

    Returns:
        (batch, n_out, *space_out).
    """
    kernels = kernels_for(x, weight, bias)
    if kernels is not None and patches.suits(x, weight):
        with suppress(KernelError):
            z: Tensor = kernels.output_scaled(
                patches, plain, x, weight, bias, form, linear_dtype(x)
            )
            return z
    return plain(x, weight, bias)


def linear_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of x or, under autocast (which ignores float64), that of linear maps."""
    return autocast_dtype(x) or x.dtype
