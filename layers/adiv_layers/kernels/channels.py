# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over (images, channels, positions) with any strides, the channels in equal groups.

Channels-last and contiguous convolutions both have this shape, and so do the rows of a linear
layer: one image, whose positions are the rows. Strides are read, never assumed, so transposed,
sliced and expanded tensors work unchanged; the tile only follows the fast direction. Offsets are
64-bit, so tensors may hold more than 2³¹ elements. Sums are computed in the dtype of the factor and
in a fixed order: two runs agree bit by bit. Programs that iterate over tiles prefetch the next tile
during the work on one.

All sizes except the strides of the fast direction are passed divided by UNIT, a power of two that
divides them, so that the compiler knows how wide an access may be.
"""

from itertools import chain
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.forms import Correction
from adiv_layers.kernels.launch import (
    Launch,
    Tile,
    divide_up,
    launches,
    strided_tile,
    unit_of,
    workers,
)


@triton.jit
def offset_of(
    image,
    position,
    channel,
    image_stride,
    channel_stride,
    position_stride,
    CHANNELS_FAST: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return offsets of a tile of positions × channels of an image; all three are 64-bit."""
    if CHANNELS_FAST:
        tile = (position * UNIT * position_stride)[:, None] + (channel * channel_stride)[None, :]
    else:
        tile = (position * position_stride)[:, None] + (channel * UNIT * channel_stride)[None, :]
    return image * UNIT * image_stride + tile


@triton.jit
def sizes_of(channels, positions, CHANNELS_FAST: tl.constexpr, UNIT: tl.constexpr):
    """Return numbers of channels and positions; the one passed divided by UNIT is 64-bit."""
    channels = tl.cast(channels, tl.int64) * UNIT if CHANNELS_FAST else channels
    positions = positions if CHANNELS_FAST else tl.cast(positions, tl.int64) * UNIT
    return channels, positions


@triton.jit
def gate_kernel(
    g,
    other,
    scaled,
    factor,
    dots,
    sums,
    images,
    channels,
    positions,
    tiles,
    steps,
    g_image,
    g_channel,
    g_position,
    other_image,
    other_channel,
    other_position,
    scaled_image,
    scaled_channel,
    scaled_position,
    CURVE: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SAME: tl.constexpr,
    STAGES: tl.constexpr,
    CHANNELS_FAST: tl.constexpr,
    UNIT: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write scaled = f·g, dots = Σ_c g·other and sums = Σ_positions g or f·g in one pass over g.

    Outputs that are None are skipped. If CURVE is not 0, dots are multiplied by CURVE·f³, and 0
    where |f| has reached LIMIT. A program keeps its channels and iterates over positions; it writes
    one row of `sums`. SAME: `other` is the same at all positions, like a bias.
    """
    channels, positions = sizes_of(channels, positions, CHANNELS_FAST, UNIT)
    group = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    wide = factor.dtype.element_ty
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < channels
    channel = group * channels + channel
    total = tl.zeros((POSITIONS, CHANNELS), wide)
    if SAME:
        value = tl.load(other + channel * other_channel, mask=among, other=0.0).to(wide)[None, :]
    for step in tl.range(tl.program_id(0), steps, tl.num_programs(0), num_stages=STAGES):
        image = (step // tiles).to(tl.int64)
        position = (step % tiles).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
        within = position < positions
        mask = within[:, None] & among[None, :]
        place = (image * tl.num_programs(1) + group) * positions + position
        f = tl.load(factor + place, mask=within, other=0.0)
        own = offset_of(image, position, channel, g_image, g_channel, g_position,
                        CHANNELS_FAST, UNIT)  # fmt: skip
        slope = tl.load(g + own, mask=mask, other=0.0).to(wide)
        if other is not None:
            if not SAME:
                own = offset_of(image, position, channel, other_image, other_channel,
                                other_position, CHANNELS_FAST, UNIT)  # fmt: skip
                value = tl.load(other + own, mask=mask, other=0.0).to(wide)
            dot = tl.sum(slope * value, 1)
            if CURVE != 0:
                dot *= CURVE * f * f * f
                if LIMIT > 0:
                    dot = tl.where(tl.abs(f) < LIMIT, dot, 0.0)
            before = part.to(tl.int64) * images * tl.num_programs(1) * positions
            tl.store(dots + before + place, dot, mask=within)
        weighted = slope * f[:, None]
        if scaled is not None:
            own = offset_of(image, position, channel, scaled_image, scaled_channel,
                            scaled_position, CHANNELS_FAST, UNIT)  # fmt: skip
            tl.store(scaled + own, weighted.to(scaled.dtype.element_ty), mask=mask)
        if sums is not None:
            total += weighted if WEIGHTED else slope
    if sums is not None:
        row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) * channels
        tl.store(sums + row + channel, tl.sum(total, 0), mask=among)


@triton.jit
def add_up_kernel(parts, total, count, width, GAIN: tl.constexpr, COUNT: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Write total = GAIN·Σ over the rows of `parts` (count, width)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    among = column < width
    sums = tl.zeros((COUNT, BLOCK), parts.dtype.element_ty)
    for start in range(0, count, COUNT):
        row = start + tl.arange(0, COUNT)
        mask = (row < count)[:, None] & among[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        sums += tl.load(parts + place, mask=mask, other=0.0)
    result = GAIN * tl.sum(sums, 0)
    tl.store(total + column, result.to(total.dtype.element_ty), mask=among)


@triton.jit
def blend_kernel(
    a,
    result,
    factor,
    other,
    shift,
    channels,
    positions,
    tiles,
    a_image,
    a_channel,
    a_position,
    other_image,
    other_channel,
    other_position,
    GAIN: tl.constexpr,
    CHANNELS_FAST: tl.constexpr,
    UNIT: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write f·a + GAIN·shift or, if there is `other`, a + GAIN·f·other, in the layout of a."""
    channels, positions = sizes_of(channels, positions, CHANNELS_FAST, UNIT)
    group = tl.program_id(1).to(tl.int64)
    wide = factor.dtype.element_ty
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < channels
    channel = group * channels + channel
    step = tl.program_id(0).to(tl.int64)
    image = step // tiles
    position = (step % tiles) * POSITIONS + tl.arange(0, POSITIONS)
    within = position < positions
    mask = within[:, None] & among[None, :]
    place = (image * tl.num_programs(1) + group) * positions + position
    f = tl.load(factor + place, mask=within, other=0.0)[:, None]
    own = offset_of(image, position, channel, a_image, a_channel, a_position, CHANNELS_FAST, UNIT)
    value = tl.load(a + own, mask=mask, other=0.0).to(wide)
    if other is not None:
        second = offset_of(image, position, channel, other_image, other_channel, other_position,
                           CHANNELS_FAST, UNIT)  # fmt: skip
        value += GAIN * f * tl.load(other + second, mask=mask, other=0.0).to(wide)
    else:
        value *= f
        if shift is not None:
            value += GAIN * tl.load(shift + channel, mask=among, other=0.0).to(wide)[None, :]
    tl.store(result + own, value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def square_sum_kernel(
    x,
    sums,
    channels,
    positions,
    tiles,
    x_image,
    x_channel,
    x_position,
    CHANNELS_FAST: tl.constexpr,
    UNIT: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write Σ_c x² over the channels of a group."""
    channels, positions = sizes_of(channels, positions, CHANNELS_FAST, UNIT)
    group = tl.program_id(1).to(tl.int64)
    wide = sums.dtype.element_ty
    step = tl.program_id(0).to(tl.int64)
    image = step // tiles
    position = (step % tiles) * POSITIONS + tl.arange(0, POSITIONS)
    within = position < positions
    total = tl.zeros((POSITIONS, CHANNELS), wide)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        mask = within[:, None] & (channel < channels)[None, :]
        channel = group * channels + channel
        own = offset_of(image, position, channel, x_image, x_channel, x_position,
                        CHANNELS_FAST, UNIT)  # fmt: skip
        value = tl.load(x + own, mask=mask, other=0.0).to(wide)
        total += value * value
    place = (image * tl.num_programs(1) + group) * positions + position
    tl.store(sums + place, tl.sum(total, 1), mask=within)


@launches
def gate(
    g: Tensor,
    other: Tensor | None,
    scaled: Tensor | None,
    factor: Tensor,
    *,
    total: bool = False,
    weighted: bool = True,
    form: Correction | None = None,
) -> Launch:
    """Fill `scaled`; make dots and sums, as partial sums over their first dimension, or None.

    Dots are multiplied by f³/gain² where a form is given, and 0 where its eps determines f.

    g, other, scaled: (images, channels, positions). factor: (images, groups, positions),
    contiguous. Dots: (parts, images, groups, positions). Sums: (programs, channels).
    """
    (images, channels, positions), groups = g.shape, factor.shape[1]
    layout = _layout(channels // groups, g, other, scaled)
    parts = divide_up(channels // groups, layout.tile.channels)
    tiles = divide_up(positions, layout.tile.positions)
    steps = images * tiles
    programs = workers(g, steps, groups * parts)
    strides = (layout.strides(x) for x in (g, other, scaled))
    constants = {
        "CURVE": 0.0 if form is None else 1.0 / form.gain**2,
        "LIMIT": 0.0 if form is None else form.limit(factor.dtype),
        "WEIGHTED": weighted,
        "SAME": other is not None and images == 1 and other.stride(2) == 0,
        # Prefetches 16 KiB of each operand (a tile of float64 is larger). Asynchronous copies need
        # at least 4 bytes.
        "STAGES": 1 + 4 // g.element_size() if layout.unit >= 4 else 1,
        **layout.options,
    }
    numbers = (images, *layout.sizes, tiles, steps, *chain.from_iterable(strides))
    dots = None if other is None else (parts, images, groups, positions)
    makes = dots, (programs, channels) if total else None
    return Launch(gate_kernel, (programs, groups, parts), numbers, constants, makes)


@launches
def add_up(parts: Tensor, total: Tensor, *, gain: float = 1.0) -> Launch:
    """Fill `total` (width,) with gain·Σ over the rows of `parts` (count, width)."""
    count, width = parts.shape
    constants = {"GAIN": gain, "COUNT": 64, "BLOCK": 32}
    return Launch(add_up_kernel, (divide_up(width, 32),), (count, width), constants)


@launches
def blend(
    a: Tensor,
    result: Tensor,
    factor: Tensor,
    other: Tensor | None,
    shift: Tensor | None,
    *,
    gain: float = 1.0,
) -> Launch:
    """Fill `result`, which has the strides of a (images, channels, positions) or is a itself.

    The result is f·a + gain·shift (one number per channel, contiguous), or a + gain·f·other.
    """
    (images, channels, positions), groups = a.shape, factor.shape[1]
    layout = _layout(channels // groups, a, other, None)
    tiles = divide_up(positions, layout.tile.positions)
    grid = images * tiles, groups, divide_up(channels // groups, layout.tile.channels)
    numbers = (*layout.sizes, tiles, *layout.strides(a), *layout.strides(other))
    return Launch(blend_kernel, grid, numbers, {"GAIN": gain, **layout.options})


@launches
def square_sum(x: Tensor, sums: Tensor) -> Launch:
    """Fill `sums` (images, groups, positions), contiguous, from x (images, channels, positions)."""
    (images, channels, positions), groups = x.shape, sums.shape[1]
    layout = _layout(channels // groups, x, None, None)
    tiles = divide_up(positions, layout.tile.positions)
    numbers = (*layout.sizes, tiles, *layout.strides(x))
    return Launch(square_sum_kernel, (images * tiles, groups), numbers, layout.options)


class _Layout(NamedTuple):
    """The tiles of a launch, which follow the memory of its tensors."""

    tile: Tile
    channels_fast: bool
    unit: int
    sizes: tuple[int, int]
    options: dict[str, int]

    def strides(self, x: Tensor | None) -> tuple[int, int, int]:
        """Return strides of image, channel, position, all but the fast one divided by the unit."""
        if x is None:
            return 0, 0, 0
        image, channel, position = x.stride()
        if self.channels_fast:
            return image // self.unit, channel, position // self.unit
        return image // self.unit, channel // self.unit, position


def _layout(channels: int, x: Tensor, second: Tensor | None, third: Tensor | None) -> _Layout:
    """Return the layout for x and tensors of its shape; a group has `channels` channels."""
    positions, fast = x.shape[2], x.stride(1) < x.stride(2)
    sizes = [channels if fast else positions]
    for tensor in (x, second, third):
        if tensor is not None:
            image, channel, position = tensor.stride()
            sizes += [image, position if fast else channel]
            if position and tensor.data_ptr() % 16:  # unaligned data is read element by element
                sizes.append(1)
    unit = unit_of(*sizes)
    tile = strided_tile(channels, positions, fast, unit)
    options = {
        "CHANNELS_FAST": fast,
        "UNIT": unit,
        "POSITIONS": tile.positions,
        "CHANNELS": tile.channels,
        "num_warps": tile.warps,
    }
    divided = (channels // unit, positions) if fast else (channels, positions // unit)
    return _Layout(tile, fast, unit, divided, options)
