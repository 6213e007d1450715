# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over rows that lie contiguous in memory: x̂ = r·x with its factor, and its backward.

Row offsets are 64-bit, so tensors may hold more than 2³¹ elements. Values are widened straight
after the load: sums are taken in the dtype of r, float32 or float64.
"""

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.kernels.launch import divide_up, rows_tile, run


@triton.jit
def unit_rows_kernel(
    x,
    unit,
    factor,
    rows,
    width,
    stride,
    CONSTANT: tl.constexpr,
    FLOOR: tl.constexpr,
    SQUARED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write factor = r and, unless `unit` is None, unit = factor·x.

    r = 1/√(‖x‖² + CONSTANT), or 1/√max(‖x‖², FLOOR) where CONSTANT is 0. If SQUARED the factor is
    r², and without a constant 0 for rows shorter than the floor, which have no direction.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    source = x + row[:, None] * stride + column[None, :]
    wide = factor.dtype.element_ty
    if WHOLE:
        mask = inside[:, None] & (column < width)[None, :]
        values = tl.load(source, mask=mask, other=0.0).to(wide)
        squares = values * values
    else:
        squares = tl.zeros((ROWS, BLOCK), wide)
        for start in range(0, width, BLOCK):
            mask = inside[:, None] & (start + column < width)[None, :]
            values = tl.load(source + start, mask=mask, other=0.0).to(wide)
            squares += values * values
    square = tl.sum(squares, 1)
    # Compared, not clamped: tl.maximum would turn NaN into the floor.
    short = square < (-1.0 if CONSTANT > 0 else FLOOR)
    square = square + CONSTANT if CONSTANT > 0 else tl.where(short, FLOOR, square)
    if SQUARED:
        r = tl.where(short, 0.0, 1.0 / square)
    else:
        r = tl.rsqrt(square)
    tl.store(factor + row, r, mask=inside)
    if unit is not None:
        target = unit + row[:, None] * width + column[None, :]
        kind = unit.dtype.element_ty
        if WHOLE:
            tl.store(target, (values * r[:, None]).to(kind), mask=mask)
        else:
            for start in range(0, width, BLOCK):
                mask = inside[:, None] & (start + column < width)[None, :]
                values = tl.load(source + start, mask=mask, other=0.0).to(wide)
                tl.store(target + start, (values * r[:, None]).to(kind), mask=mask)


@triton.jit
def unit_rows_backward_kernel(
    u,
    x,
    factor,
    gamma,
    dx,
    rows,
    width,
    stride,
    x_stride,
    UNIT: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dx = r(u − (u·x̂ + rγ)x̂); where r has reached LIMIT it is a constant, and dx = ru.

    x holds the rows x, or x̂ if UNIT.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    upstream = u + row[:, None] * stride + column[None, :]
    rows_of_x = x + row[:, None] * x_stride + column[None, :]
    target = dx + row[:, None] * width + column[None, :]
    r = tl.load(factor + row, mask=inside, other=0.0)
    wide = factor.dtype.element_ty
    if WHOLE:
        mask = inside[:, None] & (column < width)[None, :]
        slope = tl.load(upstream, mask=mask, other=0.0).to(wide)
        values = tl.load(rows_of_x, mask=mask, other=0.0).to(wide)
        products = slope * values
    else:
        products = tl.zeros((ROWS, BLOCK), wide)
        for start in range(0, width, BLOCK):
            mask = inside[:, None] & (start + column < width)[None, :]
            slope = tl.load(upstream + start, mask=mask, other=0.0).to(wide)
            values = tl.load(rows_of_x + start, mask=mask, other=0.0).to(wide)
            products += slope * values
    to_unit = 1.0 if UNIT else r
    along = tl.sum(products, 1) * to_unit
    if gamma is not None:
        along += r * tl.load(gamma + row, mask=inside, other=0.0)
    if LIMIT > 0:
        along = tl.where(r < LIMIT, along, 0.0)
    pull = along * to_unit
    kind = dx.dtype.element_ty
    if WHOLE:
        result = r[:, None] * (slope - pull[:, None] * values)
        tl.store(target, result.to(kind), mask=mask)
    else:
        for start in range(0, width, BLOCK):
            mask = inside[:, None] & (start + column < width)[None, :]
            slope = tl.load(upstream + start, mask=mask, other=0.0).to(wide)
            values = tl.load(rows_of_x + start, mask=mask, other=0.0).to(wide)
            result = r[:, None] * (slope - pull[:, None] * values)
            tl.store(target + start, result.to(kind), mask=mask)


def unit_rows(
    x: Tensor, factor: Tensor, unit: Tensor | None, constant: float, floor: float, squared: bool
) -> None:
    """Fill `factor` (…, 1) and `unit` (…, width), contiguous, from x (…, width)."""
    flat = _rows(x)
    rows, width = flat.shape
    tile = rows_tile(width, factor.dtype)
    run(
        unit_rows_kernel,
        (divide_up(rows, tile.rows),),
        x,
        flat,
        unit,
        factor,
        rows,
        width,
        flat.stride(0),
        CONSTANT=constant,
        FLOOR=floor,
        SQUARED=squared,
        WHOLE=tile.block >= width,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )


def unit_rows_backward(
    u: Tensor,
    x: Tensor,
    factor: Tensor,
    gamma: Tensor | None,
    dx: Tensor,
    limit: float,
    is_unit: bool,
) -> None:
    """Fill `dx` (…, width), contiguous, from the gradients u of x̂ and gamma of r; x is x̂ or x."""
    flat, source = _rows(u), _rows(x)
    rows, width = flat.shape
    tile = rows_tile(width, factor.dtype)
    run(
        unit_rows_backward_kernel,
        (divide_up(rows, tile.rows),),
        u,
        flat,
        source,
        factor.contiguous(),
        None if gamma is None else gamma.contiguous(),
        dx,
        rows,
        width,
        flat.stride(0),
        source.stride(0),
        UNIT=is_unit,
        LIMIT=limit,
        WHOLE=tile.block >= width,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )


def _rows(x: Tensor) -> Tensor:
    """Rows as (rows, width) with neighbouring columns side by side, which the kernels rely on."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
