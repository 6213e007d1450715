# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Corrected linear maps of few rows by a small weight, where launches cost more than arithmetic.

The rows' squared norms are summed in the loop of the matrix product, so the forward pass is one
kernel (two if the rows are wide and shared among programs), and the backward pass one: every
program processes some of the inputs and all rows and outputs. Results that several programs compute
(f, the gradient of b) are written by each of them, with equal values.

These kernels are for a network of such layers in a CUDA graph, where launches are cheap. If it is
no faster there than a network of `nn.Linear`, the general kernels suffice and these can go.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.forms import Correction, least_square
from adiv_layers.kernels.launch import Launch, divide_up, launches, power_of_two
from adiv_layers.kernels.rows import factor_of

ROWS = 64  # the most rows
INPUTS = 256  # inputs that one program of the forward pass sums over
_BLOCK, _OUT = 64, 32  # inputs and outputs of a tile


@triton.jit
def finish(
    product, square, bias, z, y, factor, row, out, rows, n_out,
    GAIN: tl.constexpr, SHIFT: tl.constexpr, CONSTANT: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Write z, f and, unless None, y (the product that f multiplies) from Wx and ‖x‖² of a tile."""
    f = factor_of(square, GAIN, CONSTANT, FLOOR, False)
    shift = tl.zeros_like(product)
    if bias is not None:
        shift += SHIFT * tl.load(bias + out, mask=out < n_out, other=0.0).to(tl.float32)[None, :]
    product = product + shift if CONSTANT > 0 else product
    result = f[:, None] * product
    result = result if CONSTANT > 0 else result + shift
    place = row[:, None] * n_out + out[None, :]
    mask = (row < rows)[:, None] & (out < n_out)[None, :]
    tl.store(z + place, result.to(z.dtype.element_ty), mask=mask)
    if y is not None:
        tl.store(y + place, product, mask=mask)
    tl.store(factor + row, f, mask=row < rows)


@triton.jit
def forward_kernel(
    x, weight, bias, z, y, factor, products, squares, rows, n_in, n_out, x_stride, w_stride,
    GAIN: tl.constexpr, SHIFT: tl.constexpr, CONSTANT: tl.constexpr, FLOOR: tl.constexpr,
    NARROW: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute Wx and ‖x‖² over INPUTS inputs; `finish` them, or write them as partial sums."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1).to(tl.int64) * OUT + tl.arange(0, OUT)
    part = tl.program_id(2).to(tl.int64)
    product = tl.zeros((ROWS, OUT), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, INPUTS, BLOCK):
        column = part * INPUTS + start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < n_in)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        mask = (out < n_out)[None, :] & (column < n_in)[:, None]
        filters = tl.load(weight + out[None, :] * w_stride + column[:, None], mask=mask, other=0.0)
        wide = values.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        product = tl.dot(values.to(NARROW), filters.to(NARROW), product, input_precision="ieee")
    if products is None:
        finish(product, square, bias, z, y, factor, row, out, rows, n_out,
               GAIN, SHIFT, CONSTANT, FLOOR)  # fmt: skip
    else:
        place = (part * rows + row)[:, None] * n_out + out[None, :]
        mask = (row < rows)[:, None] & (out < n_out)[None, :]
        tl.store(products + place, product, mask=mask)
        tl.store(squares + part * rows + row, square, mask=row < rows)


@triton.jit
def finish_kernel(
    products, squares, bias, z, y, factor, parts, rows, n_out,
    GAIN: tl.constexpr, SHIFT: tl.constexpr, CONSTANT: tl.constexpr, FLOOR: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of Wx and ‖x‖², and `finish` them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1).to(tl.int64) * OUT + tl.arange(0, OUT)
    mask = (row < rows)[:, None] & (out < n_out)[None, :]
    product = tl.zeros((ROWS, OUT), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    term = row
    for _ in range(parts):
        place = term[:, None] * n_out + out[None, :]
        product += tl.load(products + place, mask=mask, other=0.0)
        square += tl.load(squares + term, mask=row < rows, other=0.0)
        term += rows
    finish(product, square, bias, z, y, factor, row, out, rows, n_out,
           GAIN, SHIFT, CONSTANT, FLOOR)  # fmt: skip


@triton.jit
def backward_kernel(
    g, x, weight, y, factor, dx, dw, db, rows, n_in, n_out, g_row, g_out, x_stride, w_stride,
    SHIFT: tl.constexpr, SHARE: tl.constexpr, LIMIT: tl.constexpr, WEIGHTED: tl.constexpr,
    NARROW: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write gradients of BLOCK inputs, with h = f·g: dx = hW − SHARE·f³(g·y)x, dw = hᵀx.

    The gradient of b is SHIFT·Σ h, or SHIFT·Σ g if not WEIGHTED. Outputs that are None are skipped.
    f is constant where |f| has reached LIMIT.
    """
    row = tl.arange(0, ROWS).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(factor + row, mask=row < rows, other=0.0)
    mask = (row < rows)[:, None] & (column < n_in)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    result = tl.zeros((ROWS, BLOCK), tl.float32)
    along = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n_out, OUT):
        out = start + tl.arange(0, OUT).to(tl.int64)
        among = (row < rows)[:, None] & (out < n_out)[None, :]
        place = row[:, None] * g_row + out[None, :] * g_out
        slope = tl.load(g + place, mask=among, other=0.0).to(tl.float32)
        h = f[:, None] * slope
        filters = (out < n_out)[:, None] & (column < n_in)[None, :]
        if dx is not None:
            other = tl.load(y + row[:, None] * n_out + out[None, :], mask=among, other=0.0)
            along += tl.sum(slope * other, 1)
            w = tl.load(weight + out[:, None] * w_stride + column[None, :], mask=filters, other=0.0)
            result = tl.dot(h.to(NARROW), w.to(NARROW), result, input_precision="ieee")
        if dw is not None:
            total = tl.dot(tl.trans(h.to(NARROW)), values.to(NARROW), input_precision="ieee")
            own = dw + out[:, None] * n_in + column[None, :]
            tl.store(own, total.to(dw.dtype.element_ty), mask=filters)
        if db is not None:
            terms = SHIFT * tl.sum(h if WEIGHTED else slope, 0)
            tl.store(db + out, terms.to(db.dtype.element_ty), mask=out < n_out)
    if dx is not None:
        c = SHARE * f * f * f * along
        if LIMIT > 0:
            c = tl.where(tl.abs(f) < LIMIT, c, 0.0)
        result -= c[:, None] * values.to(tl.float32)
        own = dx + row[:, None] * n_in + column[None, :]
        tl.store(own, result.to(dx.dtype.element_ty), mask=mask)


_NARROW = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def small_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, y: Tensor | None, form: Correction
) -> Tensor:
    """Fill z and y (rows, n_out) from x (rows, n_in) and weight (n_out, n_in); return f (rows,).

    z holds the map in the dtype of products, y the float32 product that f multiplies.
    """
    factor = x.new_empty(len(x), dtype=torch.float32)
    products, squares = _multiply(x, weight, bias, z, y, factor, form=form)
    if products is not None:
        _finish(products, squares, bias, z, y, factor, form=form)
    return factor


@launches
def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor,
    y: Tensor | None,
    factor: Tensor,
    *,
    form: Correction,
) -> Launch:
    """Fill z, y and f; of wide rows, make partial sums of Wx and ‖x‖² instead."""
    (rows, n_in), n_out = x.shape, len(weight)
    grid, constants = _tiles(rows, n_out, form)
    parts = divide_up(n_in, INPUTS)
    constants = {
        **constants,
        "NARROW": _NARROW[z.dtype],
        "INPUTS": min(INPUTS, divide_up(n_in, _BLOCK) * _BLOCK),
        "BLOCK": _BLOCK,
    }
    makes = ((parts, rows, n_out), (parts, rows)) if parts > 1 else (None, None)
    numbers = (rows, n_in, n_out, x.stride(0), weight.stride(0))
    return Launch(forward_kernel, (*grid, parts), numbers, constants, makes)


@launches
def _finish(
    products: Tensor,
    squares: Tensor,
    bias: Tensor | None,
    z: Tensor,
    y: Tensor | None,
    factor: Tensor,
    *,
    form: Correction,
) -> Launch:
    """Fill z, y and f from partial sums."""
    parts, rows, n_out = products.shape
    grid, constants = _tiles(rows, n_out, form)
    return Launch(finish_kernel, grid, (parts, rows, n_out), constants)


def _tiles(rows: int, n_out: int, form: Correction) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid over rows and outputs, and the constants of the forward pass."""
    tile = min(ROWS, max(16, power_of_two(rows)))
    constants = {
        "GAIN": form.gain,
        "SHIFT": form.shift,
        "CONSTANT": form.constant,
        "FLOOR": least_square(form.eps, torch.float32),
        "ROWS": tile,
        "OUT": _OUT,
        "num_warps": max(4, tile * _OUT // 256),
    }
    return (divide_up(rows, tile), divide_up(n_out, _OUT)), constants


@launches
def small_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    y: Tensor | None,
    factor: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    *,
    form: Correction,
) -> Launch:
    """Fill dx, dw and db, contiguous, unless None, from the gradients g of z."""
    (rows, n_in), n_out = x.shape, len(weight)
    constants = {
        "SHIFT": form.shift,
        "SHARE": 1.0 / form.gain**2,
        "LIMIT": form.limit(torch.float32),
        "WEIGHTED": form.constant > 0,
        "NARROW": _NARROW[g.dtype],
        "ROWS": max(16, power_of_two(rows)),
        "OUT": 16,
        "BLOCK": 32,
        "num_warps": 8,  # with 4, float32 products of 64 rows spill
    }
    numbers = (rows, n_in, n_out, *g.stride(), x.stride(0), weight.stride(0))
    return Launch(backward_kernel, (divide_up(n_in, 32),), numbers, constants)
