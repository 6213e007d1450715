# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over rows that lie contiguous in memory: x̂ = f·x with its factor, and its backward.

f = GAIN/√(‖x‖² + CONSTANT), or GAIN/√max(‖x‖², FLOOR) where CONSTANT is 0. Row offsets are 64-bit,
so tensors may hold more than 2³¹ elements. Values are widened straight after the load: sums are
taken in the dtype of f, float32 or float64. Widths and strides come divided by a power of two
that divides them all, so that the compiler sees how wide an access may be.
"""

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.kernels.launch import divide_up, power_of_two, rows_tile, run, unit_of


@triton.jit
def factor_of(
    square, GAIN: tl.constexpr, CONSTANT: tl.constexpr, FLOOR: tl.constexpr, SQUARED: tl.constexpr
):
    """Factor f of rows with this ‖x‖².

    SQUARED: GAIN·r² and, without a constant, 0 for rows that are shorter than the floor and so
    have no direction.
    """
    # Compared, not clamped: a maximum would turn NaN into the floor.
    short = square < (-1.0 if CONSTANT > 0 else FLOOR)
    square = square + CONSTANT if CONSTANT > 0 else tl.where(short, FLOOR, square)
    return tl.where(short, 0.0, GAIN / square) if SQUARED else GAIN * tl.rsqrt(square)


@triton.jit
def unit_rows_kernel(
    x,
    unit,
    factor,
    rows,
    width,
    x_stride,
    unit_stride,
    GAIN: tl.constexpr,
    CONSTANT: tl.constexpr,
    FLOOR: tl.constexpr,
    SQUARED: tl.constexpr,
    COLUMN: tl.constexpr,
    UNIT: tl.constexpr,
    OWN_UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write factor = f and, unless `unit` is None, unit = f·x.

    Where COLUMN is not 0, f·COLUMN follows every row of `unit`, and zeros up to its stride.
    """
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    source = x + row[:, None] * (x_stride * UNIT) + column[None, :]
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
    f = factor_of(tl.sum(squares, 1), GAIN, CONSTANT, FLOOR, SQUARED)
    tl.store(factor + row, f, mask=inside)
    if unit is not None:
        own = unit + row[:, None] * (unit_stride * OWN_UNIT)
        kind = unit.dtype.element_ty
        end = unit_stride * OWN_UNIT if COLUMN != 0 else width
        shifted = f * COLUMN
        if WHOLE:
            mask = inside[:, None] & (column < end)[None, :]
            result = values * f[:, None]
            if COLUMN != 0:
                last = (column == width)[None, :]
                result = tl.where(last, shifted[:, None], tl.where(mask, result, 0.0))
            tl.store(own + column[None, :], result.to(kind), mask=mask)
            if COLUMN != 0:
                tail = BLOCK + tl.arange(0, 8)  # rows of BLOCK elements leave no room for it above
                mask = inside[:, None] & (tail < end)[None, :]
                result = tl.where((tail == width)[None, :], shifted[:, None], 0.0)
                tl.store(own + tail[None, :], result.to(kind), mask=mask)
        else:
            for start in range(0, end, BLOCK):
                here = start + column
                mask = inside[:, None] & (here < width)[None, :]
                values = tl.load(source + start, mask=mask, other=0.0).to(wide)
                result = values * f[:, None]
                if COLUMN != 0:
                    last = (here == width)[None, :]
                    result = tl.where(last, shifted[:, None], tl.where(mask, result, 0.0))
                mask = inside[:, None] & (here < end)[None, :]
                tl.store(own + here[None, :], result.to(kind), mask=mask)


@triton.jit
def unit_rows_backward_kernel(
    u,
    x,
    factor,
    gamma,
    dx,
    rows,
    width,
    parts,
    u_stride,
    x_stride,
    SHARE: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dx = f(u − SHARE·(u·x̂ + SHIFT·fγ)x̂); where |f| has reached LIMIT it is constant: fu.

    gamma holds γ as `parts` rows of terms. x holds the rows x, or x̂ if IS_UNIT. dx may be u.
    """
    width = width * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    upstream = u + row[:, None] * (u_stride * UNIT) + column[None, :]
    source = x + row[:, None] * (x_stride * UNIT) + column[None, :]
    target = dx + row[:, None] * width + column[None, :]
    f = tl.load(factor + row, mask=inside, other=0.0)
    wide = factor.dtype.element_ty
    if WHOLE:
        mask = inside[:, None] & (column < width)[None, :]
        slope = tl.load(upstream, mask=mask, other=0.0).to(wide)
        values = tl.load(source, mask=mask, other=0.0).to(wide)
        products = slope * values
    else:
        products = tl.zeros((ROWS, BLOCK), wide)
        for start in range(0, width, BLOCK):
            mask = inside[:, None] & (start + column < width)[None, :]
            slope = tl.load(upstream + start, mask=mask, other=0.0).to(wide)
            values = tl.load(source + start, mask=mask, other=0.0).to(wide)
            products += slope * values
    to_unit = 1.0 if IS_UNIT else f
    along = tl.sum(products, 1) * to_unit
    if gamma is not None:
        place = row
        for _ in range(parts):
            along += SHIFT * f * tl.load(gamma + place, mask=inside, other=0.0)
            place += rows
    if LIMIT > 0:
        along = tl.where(tl.abs(f) < LIMIT, along, 0.0)
    pull = SHARE * along * to_unit
    kind = dx.dtype.element_ty
    if WHOLE:
        result = f[:, None] * (slope - pull[:, None] * values)
        tl.store(target, result.to(kind), mask=mask)
    else:
        for start in range(0, width, BLOCK):
            mask = inside[:, None] & (start + column < width)[None, :]
            slope = tl.load(upstream + start, mask=mask, other=0.0).to(wide)
            values = tl.load(source + start, mask=mask, other=0.0).to(wide)
            result = f[:, None] * (slope - pull[:, None] * values)
            tl.store(target + start, result.to(kind), mask=mask)


@triton.jit
def pack_kernel(
    weight,
    bias,
    packed,
    rows,
    width,
    weight_stride,
    packed_stride,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write rows [w, b, 0, …, 0] of `packed` from rows w of the weight and the numbers of b."""
    width = width * UNIT
    end = packed_stride * 8
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    kind = packed.dtype.element_ty
    mask = inside[:, None] & (column < width)[None, :]
    source = weight + row[:, None] * (weight_stride * UNIT) + column[None, :]
    values = tl.load(source, mask=mask, other=0.0).to(kind)
    shift = tl.load(bias + row, mask=inside, other=0.0).to(kind)
    values = tl.where((column == width)[None, :], shift[:, None], values)
    mask = inside[:, None] & (column < end)[None, :]
    tl.store(packed + row[:, None] * end + column[None, :], values, mask=mask)


def unit_rows(
    x: Tensor,
    factor: Tensor,
    unit: Tensor | None,
    *,
    gain: float,
    constant: float,
    floor: float,
    squared: bool = False,
    column: float = 0.0,
) -> None:
    """Fill `factor` (rows,) and `unit` (rows, width or more) from x (…, width).

    column: what is written behind x̂, times f; 0: nothing, and `unit` is as wide as x.
    """
    flat = _rows(x)
    rows, width = flat.shape
    tile = rows_tile(width, factor.dtype)
    common = unit_of(width, flat.stride(0))
    own = width if unit is None else unit.shape[1]
    own_common = unit_of(own)
    run(
        unit_rows_kernel,
        (divide_up(rows, tile.rows),),
        x,
        flat,
        unit,
        factor,
        rows,
        width // common,
        flat.stride(0) // common,
        own // own_common,
        GAIN=gain,
        CONSTANT=constant,
        FLOOR=floor,
        SQUARED=squared,
        COLUMN=column,
        UNIT=common,
        OWN_UNIT=own_common,
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
    *,
    share: float,
    limit: float,
    is_unit: bool,
    shift: float = 1.0,
) -> None:
    """Fill `dx` (…, width), contiguous, from the gradients u of x̂ and γ of f; x is x̂ or x.

    gamma: (parts, rows), shift times whose sum over parts is γ, or None. dx may be u.
    """
    flat, source = _rows(u), _rows(x)
    rows, width = flat.shape
    tile = rows_tile(width, factor.dtype)
    common = unit_of(width, flat.stride(0), source.stride(0))
    run(
        unit_rows_backward_kernel,
        (divide_up(rows, tile.rows),),
        u,
        flat,
        source,
        factor,
        gamma,
        dx,
        rows,
        width // common,
        0 if gamma is None else gamma.shape[0],
        flat.stride(0) // common,
        source.stride(0) // common,
        SHARE=share,
        SHIFT=shift,
        LIMIT=limit,
        IS_UNIT=is_unit,
        UNIT=common,
        WHOLE=tile.block >= width,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )


def pack(weight: Tensor, bias: Tensor, packed: Tensor) -> None:
    """Fill `packed` (n_out, a multiple of 8 that is more than n_in) from weight and bias."""
    weight = _rows(weight)
    rows, width = weight.shape
    end = packed.shape[1]
    common = unit_of(width, weight.stride(0))
    block = min(1024, power_of_two(end))
    tile_rows = 2048 // block
    run(
        pack_kernel,
        (divide_up(rows, tile_rows), divide_up(end, block)),
        weight,
        weight,
        bias.contiguous(),
        packed,
        rows,
        width // common,
        weight.stride(0) // common,
        end // 8,
        UNIT=common,
        ROWS=tile_rows,
        BLOCK=block,
    )


def _rows(x: Tensor) -> Tensor:
    """Rows as (rows, width) with neighbouring columns side by side, which the kernels rely on."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
