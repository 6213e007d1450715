"""What the corrected layers are made of, each with kernels where there is a GPU to run them.

Every operation is a plain PyTorch expression. For CUDA tensors it is replaced by Triton kernels
inside an autograd function; the plain expression stays for everything else: other devices, no
Triton or one that does not work, `torch.compile` (which fuses it with its neighbours) and export,
`torch.func` transforms, forward-mode derivatives, tensor subclasses, derivatives of derivatives.
Sums are taken in float32 at least, in float64 for float64.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.autocast import autocast_dtype
from adiv_layers.forms import Correction, accumulation_dtype, least_square, times
from adiv_layers.kernels.choice import kernels_for
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.maps import Patches, Rows

Plain = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def with_kernels(*tensors: Tensor | None) -> bool:
    """Whether there are kernels for these tensors, here and now."""
    return kernels_for(*tensors) is not None


def unit_rows(x: Tensor, form: Correction) -> tuple[Tensor, Tensor]:
    """Rows of unit scale and the factor that made them so: x̂ = f·x, f as in `Correction`.

    Args:
        x: rows, shape (..., features).
        form: gain, constant and eps of f.

    Returns:
        x̂, shape (..., features), in the dtype of x or, under autocast, the autocast dtype;
        f, shape (..., 1), in float32 (float64 for float64), as is every sum within.
    """
    if (kernels := kernels_for(x)) is not None:
        with suppress(KernelError):
            unit, factor = kernels.UnitRows.apply(x, form, _linear_dtype(x))
            return unit, factor
    wide = x.to(accumulation_dtype(x.dtype))
    square = (wide * wide).sum(-1, keepdim=True)
    if form.constant > 0:
        square = square + form.constant
    else:  # clamping the square, not the norm: the derivatives of a norm are not finite at zero
        square = square.clamp_min(least_square(form.eps, square))
    factor = square.rsqrt() if form.gain == 1.0 else form.gain * square.rsqrt()
    return (factor * wide).to(_linear_dtype(x)), factor


def input_scaled(x: Tensor, weight: Tensor, bias: Tensor | None, form: Correction) -> Tensor:
    """W·x̂ + f·shift·b, or W·x̂ + shift·b where the constant is 0; x̂ and f as in `unit_rows`.

    Args:
        x: rows, (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        form: see `Correction`.

    Returns:
        (..., n_out).
    """
    if (kernels := kernels_for(x, weight, bias)) is not None:
        dtype = _linear_dtype(x)
        with suppress(KernelError):
            z: Tensor = kernels.InputScaled.apply(x, weight.to(dtype), bias, form, dtype)[0]
            return z
    unit, factor = unit_rows(x, form)
    if bias is None or form.constant == 0:
        return F.linear(unit, weight, times(bias, form.shift))
    output = F.linear(unit, weight)
    flat = output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(0)
    column = times(factor, form.shift).reshape(-1)
    return torch.addr(flat, column.to(output.dtype), bias.to(output.dtype)).view(output.shape)


def output_scaled(
    linear_map: Rows | Patches,
    plain: Plain,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Correction,
) -> Tensor:
    """f·(Wφ + shift·b) of rows or patches φ of x, or f·Wφ + shift·b where the constant is 0.

    Args:
        linear_map: what φ is.
        plain: the same as an expression of x, weight and bias.
        x: (..., n_in), or (batch, n_in, *space).
        weight: (n_out, n_in), or (n_out, n_in / groups, *kernel).
        bias: (n_out,).
        form: see `Correction`.

    Returns:
        (..., n_out), or (batch, n_out, *space_out).
    """
    kernels = kernels_for(x, weight, bias)
    if kernels is not None and linear_map.suits(x, weight):
        dtype = _linear_dtype(x)
        # A bias inside is added by the map itself.
        inner = bias.to(dtype) if bias is not None and form.constant > 0 else bias
        with suppress(KernelError):
            z: Tensor = kernels.OutputScaled.apply(
                linear_map, plain, x.to(dtype), weight.to(dtype), inner, form
            )
            return z
    return plain(x, weight, bias)


def small_linear(
    plain: Plain, x: Tensor, weight: Tensor, bias: Tensor | None, form: Correction
) -> Tensor | None:
    """Either of the two, of few rows by a small weight, in one kernel; None: not for this.

    Args:
        plain: the same as an expression of x, weight and bias.
        x: rows, (..., n_in).
        weight: (n_out, n_in).
        bias: (n_out,).
        form: see `Correction`.

    Returns:
        (..., n_out), or None.
    """
    kernels = kernels_for(x, weight, bias)
    dtype = _linear_dtype(x)
    alike = dtype != x.dtype or x.dtype == weight.dtype  # or F.linear is to say that they are not
    if kernels is not None and alike and kernels.is_small(x, weight):
        with suppress(KernelError):
            z: Tensor = kernels.SmallLinear.apply(plain, x, weight, bias, form, dtype)
            return z
    return None


def _linear_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x or, under autocast (which leaves float64 alone), that of linear maps."""
    return autocast_dtype(x) or x.dtype
