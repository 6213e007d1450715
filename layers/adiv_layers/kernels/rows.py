# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over rows that are contiguous in memory: x̂ = f·x with its factor, and its backward.

f = GAIN/√(‖x‖² + CONSTANT), or GAIN/√max(‖x‖², FLOOR) if CONSTANT is 0. Row offsets are 64-bit, so
tensors may hold more than 2³¹ elements. Values are widened directly after the load: sums are
computed in the dtype of f, float32 or float64.

Memory is accessed in aligned groups of 8 elements, whatever the width. Elements of a row before its
first whole group and after its last one (edges) are accessed separately, one by one. Groups are
those of the tensor that is written; a tensor with another alignment is read one by one.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.forms import Correction, least_square
from adiv_layers.kernels.launch import Launch, divide_up, launches, power_of_two, rows_tile, unit_of


@triton.jit
def factor_of(
    square, GAIN: tl.constexpr, CONSTANT: tl.constexpr, FLOOR: tl.constexpr, SQUARED: tl.constexpr
):
    """Return the factor f of rows with this ‖x‖².

    SQUARED: return GAIN/(‖x‖² + CONSTANT) or, without a constant, GAIN/‖x‖², and then 0 for rows
    below the floor, which have no direction.
    """
    # Compared, not clamped: a maximum would turn NaN into the floor.
    short = square < (-1.0 if CONSTANT > 0 else FLOOR)
    square = square + CONSTANT if CONSTANT > 0 else tl.where(short, FLOOR, square)
    return tl.where(short, 0.0, GAIN / square) if SQUARED else GAIN * tl.rsqrt(square)


@triton.jit
def groups_of(row, rows, width, AHEAD: tl.constexpr):
    """Return places of rows of this width in groups of 8 elements: ahead, first, last, end.

    Places count from the start of the group in which a row starts: `ahead` of them are before the
    row (AHEAD more with every row), `end` is after it, and the groups in [first, last) are whole.
    Rows out of range have no places.
    """
    ahead = ((row % 8) * AHEAD % 8).to(tl.int32)
    end = tl.where(row < rows, ahead + width, 0)
    return ahead[:, None], ((ahead + 7) // 8 * 8)[:, None], (end // 8 * 8)[:, None], end[:, None]


@triton.jit
def whole(place, first, last):
    """Return whether a place is in a whole group; equal within a group, so access can be joint."""
    group = place // 8 * 8
    return (group >= first) & (group < last)


@triton.jit
def edges_of(ahead, first, last, end, AHEAD: tl.constexpr):
    """Return the at most 7 places before and after the whole groups, and whether they exist."""
    place = tl.arange(0, 16)[None, :]
    before = place < 8
    limit = tl.where(before, 0 if AHEAD == 0 else tl.minimum(first, end), end)
    place = tl.where(before, ahead + place, tl.maximum(first, last) + place - 8)
    return place, place < limit


@triton.jit
def start_of(x, row, stride, ahead, AHEAD: tl.constexpr, UNIT: tl.constexpr):
    """Return place 0 of rows; the division tells the compiler that it is a multiple of UNIT."""
    if AHEAD == 0:
        start = row[:, None] * (stride // UNIT * UNIT)
    else:
        start = (row[:, None] * stride - ahead) // UNIT * UNIT
    return x + start


@triton.jit
def load(source, mask, UNIT: tl.constexpr):
    """Load a tile, with 0 outside; a thread loads a group, UNIT elements at once.

    If UNIT elements are less than 8 bytes, neighbouring threads load neighbouring elements and then
    exchange them for the groups that they store: otherwise the loads would be 16 bytes apart.
    """
    if UNIT * source.dtype.element_ty.primitive_bitwidth >= 64:
        return tl.load(source, mask=mask, other=0.0)
    count: tl.constexpr = source.shape[0] * source.shape[1]
    values = tl.load(tl.reshape(source, [count]), mask=tl.reshape(mask, [count]), other=0.0)
    return tl.reshape(values, source.shape)


@triton.jit
def sum_of_edges(products):
    """Return sums over the edges of rows; for a single row a number, which every thread receives.

    A tensor would have to be converted to the layout of the sums over whole groups, and Triton 3.6
    would instead load the edges again, in every thread and one by one.
    """
    sums = tl.sum(products, 1)
    return tl.sum(sums, 0) if products.shape[0] == 1 else sums


@triton.jit
def unit_rows_kernel(
    x,
    factor,
    unit,
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
    AHEAD: tl.constexpr,
    EDGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write factor = f and, unless `unit` is None, unit = f·x.

    If COLUMN is not 0, every row of `unit` is followed by f·COLUMN, and zeros up to its stride, a
    multiple of 8.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)[None, :]
    wide = factor.dtype.element_ty
    ahead, first, last, end = groups_of(row, rows, width, AHEAD)
    source = start_of(x, row, x_stride, ahead, AHEAD, UNIT)
    if WHOLE:
        mask = whole(place, first, last)
        values = load(source + place, mask, UNIT).to(wide)
        squares = values * values
    else:
        squares = tl.zeros((ROWS, BLOCK), wide)
        for start in range(0, width, BLOCK):
            mask = whole(start + place, first, last)
            values = load(source + start + place, mask, UNIT).to(wide)
            squares += values * values
    square = tl.sum(squares, 1)
    if EDGES:
        edge, among = edges_of(ahead, first, last, end, AHEAD)
        rest = tl.load(source + edge, mask=among, other=0.0).to(wide)
        square += sum_of_edges(rest * rest)
    f = factor_of(square, GAIN, CONSTANT, FLOOR, SQUARED)
    tl.store(factor + row, f, mask=row < rows)
    if unit is not None:
        own = start_of(unit, row, unit_stride, ahead, AHEAD, 8)
        kind = unit.dtype.element_ty
        f = f[:, None]
        if WHOLE:
            tl.store(own + place, (values * f).to(kind), mask=mask)
        else:
            for start in range(0, width, BLOCK):
                mask = whole(start + place, first, last)
                values = load(source + start + place, mask, UNIT).to(wide)
                tl.store(own + start + place, (values * f).to(kind), mask=mask)
        if EDGES:
            rest = rest * f
            if COLUMN != 0:
                rest = tl.where(edge == width, f * COLUMN, rest)
                among = (row < rows)[:, None] & (tl.arange(0, 16) >= 8)[None, :]
            tl.store(own + edge, rest.to(kind), mask=among)


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
    U_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    AHEAD: tl.constexpr,
    EDGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dx = f(u − SHARE·(u·x̂ + SHIFT·fγ)x̂); where |f| has reached LIMIT it is constant: fu.

    gamma holds γ as `parts` rows of partial sums. x holds rows x, or x̂ if IS_UNIT. dx may be u.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = tl.arange(0, BLOCK)[None, :]
    wide = factor.dtype.element_ty
    kind = dx.dtype.element_ty
    ahead, first, last, end = groups_of(row, rows, width, AHEAD)
    upstream = start_of(u, row, u_stride, ahead, AHEAD, U_UNIT)
    source = start_of(x, row, x_stride, ahead, AHEAD, X_UNIT)
    target = start_of(dx, row, width, ahead, AHEAD, 8)
    f = tl.load(factor + row, mask=inside, other=0.0)
    if WHOLE:
        mask = whole(place, first, last)
        slope = load(upstream + place, mask, U_UNIT).to(wide)
        values = load(source + place, mask, X_UNIT).to(wide)
        products = slope * values
    else:
        products = tl.zeros((ROWS, BLOCK), wide)
        for start in range(0, width, BLOCK):
            mask = whole(start + place, first, last)
            slope = load(upstream + start + place, mask, U_UNIT).to(wide)
            values = load(source + start + place, mask, X_UNIT).to(wide)
            products += slope * values
    if EDGES:
        # Loaded before the sum over all threads: every warp reads the edges, and one writes dx
        # over them.
        edge, among = edges_of(ahead, first, last, end, AHEAD)
        edge_slope = tl.load(upstream + edge, mask=among, other=0.0).to(wide)
        edge_values = tl.load(source + edge, mask=among, other=0.0).to(wide)
    along = tl.sum(products, 1)
    if EDGES:
        along += sum_of_edges(edge_slope * edge_values)
    to_unit = 1.0 if IS_UNIT else f
    along *= to_unit
    if gamma is not None:
        term = row
        for _ in range(parts):
            along += SHIFT * f * tl.load(gamma + term, mask=inside, other=0.0)
            term += rows
    if LIMIT > 0:
        along = tl.where(tl.abs(f) < LIMIT, along, 0.0)
    pull = (SHARE * along * to_unit)[:, None]
    f = f[:, None]
    if WHOLE:
        tl.store(target + place, (f * (slope - pull * values)).to(kind), mask=mask)
    else:
        for start in range(0, width, BLOCK):
            mask = whole(start + place, first, last)
            slope = load(upstream + start + place, mask, U_UNIT).to(wide)
            values = load(source + start + place, mask, X_UNIT).to(wide)
            tl.store(target + start + place, (f * (slope - pull * values)).to(kind), mask=mask)
    if EDGES:
        tl.store(target + edge, (f * (edge_slope - pull * edge_values)).to(kind), mask=among)


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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = place // 8 * 8
    kind = packed.dtype.element_ty
    inside = row < rows
    mask = inside[:, None] & (place // UNIT * UNIT < width)
    source = start_of(weight, row, weight_stride, None, 0, UNIT)
    values = load(source + place, mask, UNIT).to(kind)
    shift = tl.load(bias + row, mask=inside, other=0.0).to(kind)
    values = tl.where(place == width, shift[:, None], values)
    mask = inside[:, None] & (group < packed_stride)
    tl.store(start_of(packed, row, packed_stride, None, 0, 8) + place, values, mask=mask)


@launches
def unit_rows(
    x: Tensor,
    factor: Tensor,
    unit: Tensor | None,
    *,
    form: Correction,
    squared: bool = False,
    column: float = 0.0,
) -> Launch:
    """Fill `factor` (rows,) and `unit` (rows, width or more) from x (rows, width).

    column: number that is written after x̂, times f; 0: none, and `unit` is as wide as x.
    """
    rows, width = x.shape
    tile = rows_tile(width, factor.dtype)
    stride = x.stride(0) if unit is None else unit.shape[1]
    constants = {
        **factor_constants(form, factor, squared),
        "COLUMN": column,
        "UNIT": _unit(x, stride),
        "AHEAD": stride % 8,
        "EDGES": column != 0 or width % 8 != 0 or stride % 8 != 0,
        "WHOLE": tile.block >= width,
        **tile.options(),
    }
    numbers = (rows, width, x.stride(0), stride)
    return Launch(unit_rows_kernel, (divide_up(rows, tile.rows),), numbers, constants)


@launches
def unit_rows_backward(
    u: Tensor,
    x: Tensor,
    factor: Tensor,
    gamma: Tensor | None,
    dx: Tensor,
    *,
    form: Correction,
    is_unit: bool,
) -> Launch:
    """Fill `dx` (rows, width), contiguous, from the gradients u of x̂ and γ of f; x is x̂ or x.

    gamma: (parts, rows); γ is its sum over parts, times the shift if is_unit; None: it is zero.
    dx may be u.
    """
    rows, width = u.shape
    tile = rows_tile(width, factor.dtype)
    constants = {
        "SHARE": 1.0 / form.gain**2,
        "SHIFT": form.shift if is_unit else 1.0,
        "LIMIT": form.limit(factor.dtype),
        "IS_UNIT": is_unit,
        "U_UNIT": _unit(u, width),
        "X_UNIT": _unit(x, width),
        "AHEAD": width % 8,
        "EDGES": width % 8 != 0,
        "WHOLE": tile.block >= width,
        **tile.options(),
    }
    parts = 0 if gamma is None else len(gamma)
    numbers = (rows, width, parts, u.stride(0), x.stride(0))
    return Launch(unit_rows_backward_kernel, (divide_up(rows, tile.rows),), numbers, constants)


@launches
def pack(weight: Tensor, bias: Tensor, packed: Tensor) -> Launch:
    """Fill `packed` (n_out, a multiple of 8 above n_in) from weight and bias, contiguous."""
    rows, width = weight.shape
    end = packed.shape[1]
    block = min(1024, power_of_two(end))
    tile_rows = 2048 // block
    unit = unit_of(width, _unit(weight, end))
    grid = (divide_up(rows, tile_rows), divide_up(end, block))
    constants = {"UNIT": unit, "ROWS": tile_rows, "BLOCK": block}
    return Launch(pack_kernel, grid, (rows, width, weight.stride(0), end), constants)


def factor_constants(form: Correction, factor: Tensor, squared: bool = False) -> dict[str, Any]:
    """Return the parameters of `factor_of`, by name."""
    return {
        "GAIN": form.gain,
        "CONSTANT": form.constant,
        "FLOOR": least_square(form.eps, factor.dtype),
        "SQUARED": squared,
    }


def rows_of(x: Tensor) -> Tensor:
    """Return rows as (rows, width) with contiguous columns, as the kernels require."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _unit(x: Tensor, stride: int) -> int:
    """Return how many elements of x are contiguous within groups of aligned rows of this stride."""
    return 1 if x.data_ptr() % 16 else unit_of(x.stride(0) - stride)
