"""The kernels as opaque PyTorch operators `torch.ops.adiv_layers.*`.

Schema, CUDA implementation and shape function of each. They carry no autograd formula: they are
called inside the autograd functions of `adiv_layers.ops`, which is much cheaper per call. Triton is
imported when an operator first runs, so defining them needs neither Triton nor a device.
Activations are (images, channels, positions) and factors (images, groups, positions), as in
`channels`, unless said otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def space_out(space: list[int], geometry: list[int]) -> list[int]:
    """Spatial sizes of a convolution's output.

    geometry: kernel size, stride, padding, dilation, each of the length of `space`.
    """
    n = len(space)
    kernel, stride, padding, dilation = (geometry[i * n : (i + 1) * n] for i in range(4))
    return [
        (space[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(n)
    ]


def operator(signature: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: replace the function by an operator that runs it on CUDA tensors."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = implementation.__name__
        torch.library.define(f"adiv_layers::{name}", signature)
        torch.library.impl(f"adiv_layers::{name}", "CUDA", implementation)
        torch.library.register_fake(f"adiv_layers::{name}", fake)
        IMPLEMENTATIONS[name] = implementation
        return getattr(torch.ops.adiv_layers, name).default  # type: ignore[no-any-return]

    return register


def _new_rows(
    x: Tensor, constant: float, floor: float, dtype: torch.dtype, squared: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), _new_factor(x, constant, floor, squared)


def _new_factor(x: Tensor, constant: float, floor: float, squared: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


@operator("(Tensor x, float constant, float floor, ScalarType dtype, bool squared)"
          " -> (Tensor, Tensor)", _new_rows)  # fmt: skip
def unit_rows(
    x: Tensor, constant: float, floor: float, dtype: torch.dtype, squared: bool
) -> tuple[Tensor, Tensor]:
    """Rows (…, width) → r·x (or r²·x) in this dtype, and r (or r²) (…, 1)."""
    from adiv_layers.kernels import rows

    unit, factor = _new_rows(x, constant, floor, dtype, squared)
    rows.unit_rows(x, factor, unit, constant, floor, squared)
    return unit, factor


@operator("(Tensor x, float constant, float floor, bool squared) -> Tensor", _new_factor)
def row_factor(x: Tensor, constant: float, floor: float, squared: bool) -> Tensor:
    """Rows (…, width) → r or r² (…, 1)."""
    from adiv_layers.kernels import rows

    factor = _new_factor(x, constant, floor, squared)
    rows.unit_rows(x, factor, None, constant, floor, squared)
    return factor


def _new_gradient(
    u: Tensor,
    x: Tensor,
    factor: Tensor,
    gamma: Tensor | None,
    limit: float,
    is_unit: bool,
    dtype: torch.dtype,
) -> Tensor:
    return u.new_empty(u.shape, dtype=dtype)


@operator("(Tensor u, Tensor x, Tensor factor, Tensor? gamma, float limit, bool is_unit,"
          " ScalarType dtype) -> Tensor", _new_gradient)  # fmt: skip
def unit_rows_backward(
    u: Tensor,
    x: Tensor,
    factor: Tensor,
    gamma: Tensor | None,
    limit: float,
    is_unit: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Gradients u of x̂ and γ of r → r(u − (u·x̂ + rγ)x̂); ru where r has reached a limit > 0.

    is_unit: x is x̂ already.
    """
    from adiv_layers.kernels import rows

    dx = _new_gradient(u, x, factor, gamma, limit, is_unit, dtype)
    rows.unit_rows_backward(u, x, factor, gamma, dx, limit, is_unit)
    return dx


def _new_like(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x, dense, its channels fast if those of x are."""
    images, channels, positions = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(images, positions, channels).transpose(1, 2)
    return x.new_empty(images, channels, positions)


def _new_gate(
    g: Tensor,
    factor: Tensor,
    other: Tensor | None,
    scale: bool,
    total: bool,
    curved: bool,
    limit: float,
    weighted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _new_like(g if other is None else other).to(g.dtype) if scale else g.new_empty(0),
        factor.new_empty(0 if other is None else factor.shape),
        factor.new_empty(g.shape[1] if total else 0),
    )


@operator("(Tensor g, Tensor factor, Tensor? other, bool scale, bool total, bool curved,"
          " float limit, bool weighted) -> (Tensor, Tensor, Tensor)", _new_gate)  # fmt: skip
def gate(
    g: Tensor,
    factor: Tensor,
    other: Tensor | None,
    scale: bool,
    total: bool,
    curved: bool,
    limit: float,
    weighted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over g: r·g, Σ_c g·other, Σ_positions of r·g (of g, if not weighted).

    What is not asked for is an empty tensor. curved: the second is times r³, and 0 where r has
    reached a limit > 0.
    """
    from adiv_layers.kernels import channels

    scaled, dots, sums = _new_gate(g, factor, other, scale, False, curved, limit, weighted)
    found = channels.gate(
        g,
        factor,
        other,
        scaled=scaled if scale else None,
        total=total,
        curved=curved,
        limit=limit,
        weighted=weighted,
    )
    return scaled, dots if found[0] is None else found[0], sums if found[1] is None else found[1]


def _nothing(*_: Any) -> None:
    return None


@operator("(Tensor(a!) result, Tensor y, Tensor factor, Tensor? shift) -> ()", _nothing)
def scale_(result: Tensor, y: Tensor, factor: Tensor, shift: Tensor | None) -> None:
    """Fill the result, which has the strides of y, with r·y + shift (one number per channel)."""
    from adiv_layers.kernels import channels

    channels.blend(y, result, factor, shift=shift)


@operator("(Tensor(a!) a, Tensor factor, Tensor other, float sign) -> ()", _nothing)
def add_(a: Tensor, factor: Tensor, other: Tensor, sign: float) -> None:
    """In place: a = a + sign·r·other."""
    from adiv_layers.kernels import channels

    channels.blend(a, a, factor, other, sign=sign)


def _new_patch_factor(
    x: Tensor, groups: int, geometry: list[int], constant: float, floor: float
) -> Tensor:
    shape = (x.shape[0], groups, *space_out(list(x.shape[2:]), geometry))
    return x.new_empty(shape, dtype=accumulation_dtype(x.dtype))


@operator("(Tensor x, int groups, int[] geometry, float constant, float floor) -> Tensor",
          _new_patch_factor)  # fmt: skip
def patch_factor(
    x: Tensor, groups: int, geometry: list[int], constant: float, floor: float
) -> Tensor:
    """Factor r of every patch of x (images, channels, depth, height, width), zero padding."""
    from adiv_layers.kernels import channels, patch

    factor = _new_patch_factor(x, groups, geometry, constant, floor)
    q = factor.new_empty(x.shape[0], groups, *x.shape[2:])
    channels.square_sum(x.flatten(2), q.flatten(2))
    patch.box(q, factor, geometry, constant, floor)
    return factor


def _new_spread(c: Tensor, space: list[int], geometry: list[int]) -> Tensor:
    return c.new_empty((*c.shape[:2], *space))


@operator("(Tensor c, int[] space, int[] geometry) -> Tensor", _new_spread)
def box_transposed(c: Tensor, space: list[int], geometry: list[int]) -> Tensor:
    """(images, groups, *space_out) → (images, groups, *space): at a position, Σ of c over patches.

    Both spaces have three dimensions.
    """
    from adiv_layers.kernels import patch

    spread = _new_spread(c, space, geometry)
    patch.box_transposed(c, spread, geometry)
    return spread
