# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"
# ruff: noqa: RUF005 -- tuples in a kernel are added, not unpacked
"""One pass over a layer's rows: scales, the effect of the other rows, and all row products."""

import torch
import triton
import triton.language as tl
from adiv_layers.kernels.launch import divide_up, power_of_two, run, workers
from torch import Tensor

_TILE = 256  # entries of every vector that a program holds at once


@triton.jit
def read(first, second, row, first_row, second_row, column, mask):
    """Load a part of some rows; with two tensors, of their sum."""
    value = tl.load(first + row * first_row + column, mask=mask, other=0.0)
    if second is not None:
        value += tl.load(second + row * second_row + column, mask=mask, other=0.0)
    return value


@triton.jit
def square_of(phi, place, patch, mask):
    """Return Σ φ² over the `patch` entries from each place."""
    square = tl.zeros(place.shape, tl.float32)
    for k in range(patch):
        value = tl.load(phi + place + k, mask=mask, other=0.0)
        square += value * value
    return square


@triton.jit
def row_products_kernel(
    phi, gradient, factor, e, e_bias, z, d, d_bias, products, scales, lengths, sums, norms, largest,
    rows, width, groups, patch, phi_row, g_row, e_row, e_bias_row, z_row, d_row, d_bias_row,
    feature, GROUPED: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the results of `row_products` for a program's rows."""
    of_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within = of_row < rows
    row, inside = of_row[:, None], within[:, None]
    first = tl.arange(0, BLOCK)[None, :]
    zero = tl.zeros((ROWS, BLOCK), tl.float32)
    length = zero
    if GROUPED:
        shift, shift_square, most = zero, zero, zero
        outputs = width // groups
        pivot = tl.sum(square_of(phi, first * 0, patch, first == 0)) + feature * feature
    else:
        for start in range(0, patch, BLOCK):
            column = start + first
            mask = inside & (column < patch)
            value = tl.load(phi + row * phi_row + column, mask=mask, other=0.0)
            length += value * value
        of_rows = tl.sum(length, 1) + feature * feature
        tl.store(scales + of_row, of_rows, mask=within)
        scale = of_rows[:, None]
    f = 1.0
    if factor is not None:
        f = tl.load(factor).to(tl.float32)
    found = ()
    for _ in tl.static_range(PAIRS):
        found = found + (zero,)
    for start in range(0, width, BLOCK):
        column = start + first
        mask = inside & (column < width)
        if GROUPED:
            group = (column // outputs).to(tl.int64)
            square = square_of(phi, row * phi_row + group * patch, patch, mask)
            scale = square + feature * feature
            lead = mask & (column % outputs == 0)
            tl.store(scales + row * groups + group, scale, mask=lead)
            length += tl.where(lead, square, 0.0)
            shifted = tl.where(lead, scale - pivot, 0.0)
            shift += shifted
            shift_square += shifted * shifted
            most = tl.maximum(most, tl.where(lead, scale, 0.0))
        g = read(gradient, None, row, g_row, 0, column, mask) * f
        moved = read(e, e_bias, row, e_row, e_bias_row, column, mask)
        own = scale * g
        vectors = (moved, g)
        if GROUPED:
            vectors = (own,) + vectors
        if d is not None:
            vectors = vectors + (read(d, d_bias, row, d_row, d_bias_row, column, mask),)
        if d_bias is not None:
            vectors = vectors + (read(d_bias, None, row, d_bias_row, 0, column, mask),)
        vectors = vectors + (read(z, None, row, z_row, 0, column, mask), moved - own)
        more = ()
        for i in tl.static_range(K):
            more = more + (found[i] + vectors[i] * vectors[i],)
        for i in tl.static_range(K - 3):  # neighbours, up to z
            more = more + (found[K + i] + vectors[i] * vectors[i + 1],)
        if GROUPED:
            more = more + (found[PAIRS - 1] + own * g,)
        found = more
    place = products + of_row * PAIRS
    for i in tl.static_range(PAIRS):
        tl.store(place + i, tl.sum(found[i], 1), mask=within)
    total = tl.sum(length, 1)
    tl.store(lengths + of_row, tl.sqrt(total), mask=within)
    if GROUPED:
        tl.store(sums + of_row, tl.sum(shift, 1), mask=within)
        tl.store(norms + of_row, tl.sqrt(tl.sum(shift_square, 1)), mask=within)
        top = tl.max(most, 1)
        top = tl.where(total != total, total, top)  # tl.max drops NaN
        tl.store(largest + of_row, top, mask=within)


def row_products(
    phi: Tensor,
    G: Tensor,
    factor: Tensor | None,
    e: Tensor,
    e_bias: Tensor | None,
    z: Tensor,
    d: Tensor | None,
    d_bias: Tensor | None,
    *,
    feature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Return products of row vectors (rows, pairs), scales s (rows, groups), ‖φ_r‖, group sums.

    The vectors are, with several groups, the part of e by the row's own scale, then e, G, d, the
    bias's part of d, z, and the part of e by the other rows; None arguments are skipped. The
    products are all squares in this order, then those of neighbours before z, then, with several
    groups, own·G. With several groups the last result is (3, rows): Σ (s − p) and √Σ (s − p)² over
    a row's scales, p being the first scale of all, and the largest scale; else it is None.

    Args:
        phi: features of the weight, (rows, groups, n_feat).
        G: (rows, n_total), to be multiplied by the factor.
        factor: one number; None: 1.
        e: the weight's part of e, (rows, n_total).
        e_bias: the bias's part, to be added to it; None: no bias.
        z: (rows, n_total).
        d: the weight's part of d, as for e; None: no step was taken.
        d_bias: as e_bias.
        feature: φ_b, 0 without a bias.

    Returns:
        The four results; None if the kernel does not support these dtypes or shapes.
    """
    vectors = [G, e, e_bias, z, d, d_bias]
    if any(t is not None and t.dtype != torch.float32 for t in (phi, *vectors)):
        return None
    (rows, groups, patch), width = phi.shape, G.shape[1]
    if any(t is not None and t.shape != G.shape for t in vectors) or width % groups or not width:
        return None
    phi = phi.contiguous()
    read = [t if t is None or t.stride(1) == 1 else t.contiguous() for t in vectors]
    k = 4 + (groups > 1) + (d is not None) + (d_bias is not None)
    pairs = k + (k - 3) + (groups > 1)
    products, scales = G.new_empty(rows, pairs), G.new_empty(rows, groups)
    lengths, of_groups = G.new_empty(rows), G.new_empty(3, rows) if groups > 1 else None
    block = max(32, min(_TILE, power_of_two(width)))
    tile = min(_TILE // block, power_of_two(divide_up(rows, workers(G, rows, 1))))
    run(
        row_products_kernel,
        (divide_up(rows, tile),),
        G,
        phi,
        read[0],
        factor,
        *read[1:],
        *(products, scales, lengths, *((None,) * 3 if of_groups is None else of_groups)),
        *(rows, width, groups, patch, phi.stride(0)),
        *(0 if t is None else t.stride(0) for t in read),
        feature,
        GROUPED=groups > 1,
        K=k,
        PAIRS=pairs,
        ROWS=tile,
        BLOCK=block,
        num_warps=max(1, tile * block // 64),
    )
    return products, scales, lengths, of_groups
