# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Batch normalisation of some rows: moments of every channel, then x̂ of the rows."""

import torch
import triton
import triton.language as tl
from adiv_layers.kernels.launch import divide_up, power_of_two, run, workers
from torch import Tensor

from adiv_monitor.kernels.views import as_images

# 256: two programs on every multiprocessor, even if all channels are in one column.
_TILE, _MOST_PARTS = 2048, 256
_AT_ONCE = 64  # parts that are summed at once


@triton.jit
def pivot_of(x, pivots, channel, x_channel, among):
    """Load a channel's pivot, a value near its mean: its first entry if no pivots are given."""
    if pivots is not None:
        pivot = tl.load(pivots + channel, mask=among, other=0.0)
    else:
        pivot = tl.load(x + channel.to(tl.int64) * x_channel, mask=among, other=0.0)
    return pivot.to(tl.float32)


@triton.jit
def moments_kernel(
    x, pivots, sums, positions, width, tiles, steps, x_image, x_position, x_channel,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute Σ (x − p) and Σ (x − p)² of a program's share of positions; p: a channel's pivot."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < width
    own = x + channel.to(tl.int64) * x_channel
    pivot = pivot_of(x, pivots, channel, x_channel, among)
    total = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    square = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    for step in tl.range(part, steps, tl.num_programs(0), num_stages=3):
        image = (step // tiles).to(tl.int64)
        position = (step % tiles).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
        mask = (position < positions)[:, None] & among[None, :]
        place = image * x_image + position * x_position
        value = tl.load(own[None, :] + place[:, None], mask=mask, other=0.0).to(tl.float32)
        shifted = tl.where(mask, value - pivot[None, :], 0.0)
        total += shifted
        square += shifted * shifted
    sums += part.to(tl.int64) * width
    tl.store(sums + channel, tl.sum(total, 0), mask=among)
    sums += tl.num_programs(0).to(tl.int64) * width
    tl.store(sums + channel, tl.sum(square, 0), mask=among)


@triton.jit
def added_up(sums, parts, width, channel, among, PARTS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the sums of some channels over their parts, PARTS at once."""
    total = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        place = part.to(tl.int64)[:, None] * width + channel[None, :]
        mask = (part < parts)[:, None] & among[None, :]
        total += tl.load(sums + place, mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def normalised_rows_kernel(
    x, pivots, sums, chosen, unit, parts, rows, positions, width, total, eps, x_image, x_position,
    x_channel, ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute x̂ = (x − mean) / √(var + ε) of some rows, from the partial sums of the moments."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < width
    shift = added_up(sums, parts, width, channel, among, PARTS, CHANNELS) / total
    sums += tl.cast(width, tl.int64) * parts
    square = added_up(sums, parts, width, channel, among, PARTS, CHANNELS) / total
    factor = tl.rsqrt(square - shift * shift + eps)
    own = x + channel.to(tl.int64) * x_channel
    pivot = pivot_of(x, pivots, channel, x_channel, among)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = number < rows
    if chosen is not None:
        row = tl.load(chosen + number, mask=within, other=0)
    else:
        row = number.to(tl.int64)
    place = (row // positions) * x_image + (row % positions) * x_position
    mask = within[:, None] & among[None, :]
    value = tl.load(own[None, :] + place[:, None], mask=mask, other=0.0).to(tl.float32)
    result = (value - pivot[None, :] - shift[None, :]) * factor[None, :]
    tl.store(unit + number.to(tl.int64)[:, None] * width + channel[None, :], result, mask=mask)


def normalised_rows(
    x: Tensor,
    pivots: Tensor | None = None,
    *,
    chosen: Tensor | None,
    rows: int,
    eps: float,
) -> Tensor | None:
    """Return x̂ (rows, channels) of some rows of x (..., channels), by the moments of all rows.

    Args:
        x: tensor, read once, and the chosen rows once more.
        pivots: a number near each channel's mean, (channels,); None: the channel's first entry.
        chosen: indices of the rows, int64; None: the first rows.
        rows: number of rows.
        eps: ε.
    """
    view = as_images(x)
    if view is None:
        return None
    images, positions, width = view.shape
    fast = view.stride(2) <= view.stride(1)
    channels = min(power_of_two(width), 128 if fast else 16)
    tile = min(power_of_two(positions), _TILE // channels)
    columns, tiles = divide_up(width, channels), divide_up(positions, tile)
    steps = images * tiles
    parts = min(_MOST_PARTS, workers(view, steps, columns))
    sums = view.new_empty((2, parts, width), dtype=torch.float32)
    sizes = (positions, width, tiles, steps, *view.stride())
    options = {"POSITIONS": tile, "CHANNELS": channels}
    run(moments_kernel, (parts, columns), view, view, pivots, sums, *sizes, **options)
    unit = view.new_empty((rows, width), dtype=torch.float32)
    few = min(16, power_of_two(rows))
    run(
        normalised_rows_kernel,
        (divide_up(rows, few), divide_up(width, 64)),
        view,
        *(view, pivots, sums, chosen, unit, parts, rows, positions, width, images * positions, eps),
        *view.stride(),
        ROWS=few,
        CHANNELS=64,
        PARTS=min(_AT_ONCE, power_of_two(parts)),
    )
    return unit
