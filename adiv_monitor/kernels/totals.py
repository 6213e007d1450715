# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Sums over the rows of several layers with equal numbers of rows."""

import torch
import triton
import triton.language as tl
from adiv_layers.kernels.launch import power_of_two, run
from torch import Tensor

_SUMS = 7
_BLOCK = 2048
# Most rows: one multiprocessor reads a layer, which is slower than PyTorch for more rows.
_MOST = 2**15


@triton.jit
def totals_kernel(
    weight_square, bias_square, square, bias, count, sums, entries, layers, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one layer per program, in two passes."""
    layer = tl.program_id(0).to(tl.int64)
    zero = tl.zeros((BLOCK,), tl.float32)
    active, G_G, own_G, own_own = zero.to(tl.int32), zero, zero, zero
    total, most, weights = zero, zero, zero
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        place = layer * rows + row
        length = tl.load(square + place, mask=mask, other=0.0)
        of_weight = tl.load(weight_square + place, mask=mask, other=0.0)
        scale = of_weight + bias
        if bias_square is not None:
            scale = of_weight + tl.load(bias_square + place, mask=mask, other=0.0)
        is_active = length != 0
        own = scale * length
        masked = tl.where(is_active, scale, 0.0)
        active += is_active.to(tl.int32)
        G_G += length
        own_G += own
        own_own += scale * own
        total += masked
        most = tl.maximum(most, masked)
        weights += of_weight
        tl.store(entries + place, tl.where(is_active, scale, float("nan")), mask=mask)
    many = tl.sum(active, 0)
    sum_of_scales = tl.sum(total, 0)
    mean = sum_of_scales / many.to(tl.float32)
    # A second pass, so that the spread of equal scales is exactly zero.
    spread = zero
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        place = layer * rows + row
        length = tl.load(square + place, mask=mask, other=0.0)
        scale = tl.load(weight_square + place, mask=mask, other=0.0) + bias
        if bias_square is not None:
            scale = tl.load(weight_square + place, mask=mask, other=0.0)
            scale += tl.load(bias_square + place, mask=mask, other=0.0)
        deviation = tl.where(length != 0, scale - mean, 0.0)
        spread += deviation * deviation
    top = tl.max(most, 0)
    top = tl.where(sum_of_scales != sum_of_scales, sum_of_scales, top)  # tl.max drops NaN
    tl.store(count + layer, many.to(tl.int64))
    found = (tl.sum(G_G, 0), tl.sum(own_G, 0), tl.sum(own_own, 0), sum_of_scales,
             tl.sqrt(tl.sum(spread, 0)), top, tl.sum(weights, 0))  # fmt: skip
    place = layer
    for i in tl.static_range(7):
        tl.store(sums + place, found[i])
        place += layers


def totals(
    weight_square: Tensor, square: Tensor, bias_square: Tensor | None, *, bias: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the number of active rows (layers, 1), sums over them, and scales of active rows.

    The sums (7, layers, 1) are Σ ‖g_r‖², Σ s_r ‖g_r‖², Σ s_r² ‖g_r‖², Σ s_r, √(Σ (s_r − mean)²),
    the largest s_r, and Σ ‖φ_W‖² over all rows. The scales (layers, rows) are NaN for other rows.

    Return None for very many rows, where PyTorch's own sums use the device better.

    Args:
        weight_square: ‖φ_W‖², (layers, rows).
        square: ‖g_r‖², (layers, rows).
        bias_square: ‖φ_b‖², (layers, rows); None: it is `bias` for all rows.
        bias: ‖φ_b‖² of all rows.
    """
    given = (weight_square, square, *([] if bias_square is None else [bias_square]))
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in given):
        return None
    layers, rows = square.shape
    if rows > _MOST:
        return None
    count = torch.empty((layers, 1), dtype=torch.int64, device=square.device)
    sums, entries = square.new_empty(_SUMS, layers, 1), torch.empty_like(square)
    arguments = (weight_square, bias_square, square, bias, count, sums, entries, layers, rows)
    block = max(128, min(_BLOCK, power_of_two(rows)))
    run(totals_kernel, (layers,), square, *arguments, BLOCK=block, num_warps=8)
    return count, sums, entries
