"""What the corrected layers are made of, each with kernels where there is a GPU to run them.

Every operation is a plain PyTorch expression. For CUDA tensors it is replaced by Triton kernels
inside an autograd function; the plain expression stays for everything else: other devices, no
Triton or a broken one, `torch.compile` (which fuses it with its neighbours) and export,
`torch.func` transforms, forward-mode derivatives, tensor subclasses, derivatives of derivatives.
Sums are taken in float32 at least, in float64 for float64.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_layers.kernels import library
from adiv_layers.kernels.functions import AddFactor, Scaled, UnitRows, floor_of, usable
from adiv_layers.kernels.launch import KernelError
from adiv_layers.kernels.library import accumulation_dtype
from adiv_layers.kernels.maps import Patches, Rows, columns

__all__ = ["linear_plus_factor", "row_gradients", "scaled", "unit_rows", "usable"]


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
    if usable(x):
        with suppress(KernelError):
            unit, factor = UnitRows.apply(x, constant, eps, _output_dtype(x))
            return unit, factor
    wide = x.to(accumulation_dtype(x.dtype))
    square = (wide * wide).sum(-1, keepdim=True)
    # Clamping the square, not the norm: the derivatives of a norm are not finite at zero.
    square = square + constant if constant > 0 else square.clamp_min(floor_of(eps, x.dtype))
    factor = square.rsqrt()
    return (factor * wide).to(_output_dtype(x)), factor


def linear_plus_factor(unit: Tensor, factor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Wx̂ + r·b: the affine-like map (eqn 19) of what `unit_rows` gave.

    Args:
        unit: x̂, (..., n_in).
        factor: r, (..., 1).
        weight: (n_out, n_in).
        bias: (n_out,).

    Returns:
        (..., n_out).
    """
    if usable(unit, factor, weight, bias):
        with suppress(KernelError):
            added: Tensor = AddFactor.apply(unit, factor, _as_autocast(weight), bias)
            return added
    output = F.linear(unit, weight)
    flat = output.flatten(0, -2) if output.dim() > 1 else output.unsqueeze(0)
    column, row = factor.reshape(-1).to(output.dtype), bias.to(output.dtype)
    return torch.addr(flat, column, row).view(output.shape)


def scaled(
    linear_map: Rows | Patches,
    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constant: float,
    eps: float,
) -> Tensor:
    """(Wφ + b)·r of rows or patches φ of x, or Wφ·r + b where constant is 0; r as in `unit_rows`.

    Args:
        linear_map: what φ is.
        plain: the same as an expression of x, weight and bias.
        x: (..., n_in), or (batch, n_in, *space).
        weight: (n_out, n_in), or (n_out, n_in / groups, *kernel).
        bias: (n_out,).
        constant: what is added to the squared norm, at least 0.
        eps: the smallest norm that is divided by; used where constant is 0.

    Returns:
        (..., n_out), or (batch, n_out, *space_out).
    """
    if not (usable(x, weight, bias) and linear_map.suits(x, weight)):
        return plain(x, weight, bias)
    # A bias inside is added by the map itself.
    inner = _as_autocast(bias) if bias is not None and constant > 0 else bias
    with suppress(KernelError):
        output: Tensor = Scaled.apply(
            linear_map, plain, _as_autocast(x), _as_autocast(weight), inner, constant, eps
        )
        return output
    return plain(x, weight, bias)


def row_gradients(
    x: Tensor, g: Tensor, constant: float, eps: float, gain: float, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of W and b with every row's share times gain·r² (eqns 20, 21); by kernels only.

    ∂W = gain·Σ r² g xᵀ; ∂b = gain·Σ r² g or, where constant is 0, gain·Σ g. r as in `unit_rows`.

    Args:
        x: rows, (rows, n_in), `usable`.
        g: gradients of the outputs, (rows, n_out).
        constant: what is added to the squared norm, at least 0.
        eps: the smallest norm that is divided by; used where constant is 0.
        gain: what multiplies either gradient.
        has_bias: whether the second is wanted.

    Returns:
        (n_out, n_in) and (n_out,) or None.
    """
    floor, weighted = floor_of(eps, x.dtype), constant > 0
    # Scale the narrower one; near x = 0 only r²·x is sure to be finite.
    narrow_x = x.shape[1] <= g.shape[1] or not weighted
    if narrow_x:
        x, factor = library.unit_rows(x, constant, floor, x.dtype, True)
    else:
        factor = library.row_factor(x, constant, floor, True)
    db = None
    if has_bias or not narrow_x:
        h, _, db = library.gate(
            columns(g), factor.view(1, 1, -1), None, not narrow_x, has_bias, False, 0.0, weighted
        )
        g = g if narrow_x else h.squeeze(0).t()
    dw = g.t() @ x
    if gain != 1.0:
        dw, db = dw.mul_(gain), None if db is None else db.mul_(gain)
    return dw, db.to(g.dtype) if has_bias and db is not None else None


def _as_autocast(x: Tensor) -> Tensor:
    """What autocast would cast within a linear map, cast before it."""
    return x.to(_output_dtype(x))


def _output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x or, under autocast (which leaves float64 alone), that of linear maps."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype  # the meta device, say, knows no autocast
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
