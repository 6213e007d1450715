# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels over (images, channels, positions) with any strides, the channels in equal groups.

Channels-last and contiguous convolutions are both of this shape, and so are the rows of a linear
layer: one image, whose positions are the rows. Strides are read, never assumed, so transposed,
sliced and expanded tensors are right as they are; the tile merely follows the fast direction.
Offsets are 64-bit, so tensors may hold more than 2³¹ elements. Sums are taken in the dtype of the
factor, and in a fixed order: two runs agree bit by bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from adiv_layers.kernels.launch import Tile, divide_up, run, strided_tile, workers


@triton.jit
def gate_kernel(
    g,
    factor,
    other,
    scaled,
    dots,
    sums,
    images,
    channels,
    positions,
    g_image,
    g_channel,
    g_position,
    other_image,
    other_channel,
    other_position,
    scaled_image,
    scaled_channel,
    scaled_position,
    CURVED: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write scaled = r·g, dots = Σ_c g·other and sums = Σ_positions g or r·g in one pass over g.

    What is None is left out. CURVED multiplies dots by r³, and by 0 where r has reached LIMIT.
    A program keeps its channels and walks over positions; it writes one row of `sums`.
    """
    group = tl.program_id(1)
    part = tl.program_id(2)
    wide = factor.dtype.element_ty
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < channels
    channel = (group * channels + channel).to(tl.int64)
    total = tl.zeros((POSITIONS, CHANNELS), wide)
    tiles = tl.cdiv(positions, POSITIONS)
    step = tl.program_id(0).to(tl.int64)
    while step < images * tiles:
        image = step // tiles
        position = (step % tiles) * POSITIONS + tl.arange(0, POSITIONS)
        within = position < positions
        mask = within[:, None] & among[None, :]
        place = (image * tl.num_programs(1) + group) * positions + position
        r = tl.load(factor + place, mask=within, other=0.0)
        offset = position[:, None] * g_position + channel[None, :] * g_channel
        slope = tl.load(g + image * g_image + offset, mask=mask, other=0.0).to(wide)
        if other is not None:
            offset = position[:, None] * other_position + channel[None, :] * other_channel
            value = tl.load(other + image * other_image + offset, mask=mask, other=0.0).to(wide)
            dot = tl.sum(slope * value, 1)
            if CURVED:
                dot *= r * r * r
                if LIMIT > 0:
                    dot = tl.where(r < LIMIT, dot, 0.0)
            before = part.to(tl.int64) * images * tl.num_programs(1) * positions
            tl.store(dots + before + place, dot, mask=within)
        weighted = slope * r[:, None]
        if scaled is not None:
            offset = position[:, None] * scaled_position + channel[None, :] * scaled_channel
            target = scaled + image * scaled_image + offset
            tl.store(target, weighted.to(scaled.dtype.element_ty), mask=mask)
        if sums is not None:
            total += weighted if WEIGHTED else slope
        step += tl.num_programs(0)
    if sums is not None:
        row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) * channels
        tl.store(sums + row + channel, tl.sum(total, 0), mask=among)


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
    SIGN: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write r·a + shift or, where there is an other, a + SIGN·r·other, with the strides of a."""
    group = tl.program_id(1)
    wide = factor.dtype.element_ty
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    among = channel < channels
    channel = (group * channels + channel).to(tl.int64)
    step = tl.program_id(0).to(tl.int64)
    image = step // tiles
    position = (step % tiles) * POSITIONS + tl.arange(0, POSITIONS)
    within = position < positions
    mask = within[:, None] & among[None, :]
    place = (image * tl.num_programs(1) + group) * positions + position
    r = tl.load(factor + place, mask=within, other=0.0)[:, None]
    own = image * a_image + position[:, None] * a_position + channel[None, :] * a_channel
    value = tl.load(a + own, mask=mask, other=0.0).to(wide)
    if other is not None:
        offset = position[:, None] * other_position + channel[None, :] * other_channel
        second = tl.load(other + image * other_image + offset, mask=mask, other=0.0).to(wide)
        value += SIGN * r * second
    else:
        value *= r
        if shift is not None:
            value += tl.load(shift + channel, mask=among, other=0.0).to(wide)[None, :]
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
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write Σ_c x² over the channels of a group."""
    group = tl.program_id(1)
    wide = sums.dtype.element_ty
    step = tl.program_id(0).to(tl.int64)
    image = step // tiles
    position = (step % tiles) * POSITIONS + tl.arange(0, POSITIONS)
    within = position < positions
    total = tl.zeros((POSITIONS, CHANNELS), wide)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        mask = within[:, None] & (channel < channels)[None, :]
        channel = (group * channels + channel).to(tl.int64)
        offset = position[:, None] * x_position + channel[None, :] * x_channel
        value = tl.load(x + image * x_image + offset, mask=mask, other=0.0).to(wide)
        total += value * value
    place = (image * tl.num_programs(1) + group) * positions + position
    tl.store(sums + place, tl.sum(total, 1), mask=within)


def gate(
    g: Tensor,
    factor: Tensor,
    other: Tensor | None,
    *,
    scaled: Tensor | None,
    total: bool,
    curved: bool = False,
    limit: float = 0.0,
    weighted: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill `scaled`; return dots (images, groups, positions) and sums (channels,), or None.

    g, other, scaled: (images, channels, positions). factor: (images, groups, positions).
    """
    (images, channels, positions), groups = g.shape, factor.shape[1]
    tile = _tile(g, channels // groups)
    parts = divide_up(channels // groups, tile.channels)
    steps = images * divide_up(positions, tile.positions)
    programs = workers(g, steps, groups * parts)
    dots = None if other is None else factor.new_empty(parts, images, groups, positions)
    sums = factor.new_empty(programs, channels) if total else None
    run(
        gate_kernel,
        (programs, groups, parts),
        g,
        g,
        factor.contiguous(),
        other,
        scaled,
        dots,
        sums,
        images,
        channels // groups,
        positions,
        *g.stride(),
        *_strides(other),
        *_strides(scaled),
        CURVED=curved,
        LIMIT=limit,
        WEIGHTED=weighted,
        POSITIONS=tile.positions,
        CHANNELS=tile.channels,
        num_warps=tile.warps,
    )
    return _add_up(dots), _add_up(sums)


def blend(
    a: Tensor,
    result: Tensor,
    factor: Tensor,
    other: Tensor | None = None,
    shift: Tensor | None = None,
    sign: float = 1.0,
) -> None:
    """Fill `result`, which has the strides of a (images, channels, positions) or is a itself."""
    (images, channels, positions), groups = a.shape, factor.shape[1]
    tile = _tile(a, channels // groups)
    tiles = divide_up(positions, tile.positions)
    run(
        blend_kernel,
        (images * tiles, groups, divide_up(channels // groups, tile.channels)),
        a,
        a,
        result,
        factor.contiguous(),
        other,
        None if shift is None else shift.contiguous(),
        channels // groups,
        positions,
        tiles,
        *a.stride(),
        *_strides(other),
        SIGN=sign,
        POSITIONS=tile.positions,
        CHANNELS=tile.channels,
        num_warps=tile.warps,
    )


def square_sum(x: Tensor, sums: Tensor) -> None:
    """Fill `sums` (images, groups, positions), contiguous, from x (images, channels, positions)."""
    (images, channels, positions), groups = x.shape, sums.shape[1]
    tile = _tile(x, channels // groups)
    tiles = divide_up(positions, tile.positions)
    run(
        square_sum_kernel,
        (images * tiles, groups),
        x,
        x,
        sums,
        channels // groups,
        positions,
        tiles,
        *x.stride(),
        POSITIONS=tile.positions,
        CHANNELS=tile.channels,
        num_warps=tile.warps,
    )


def _tile(x: Tensor, channels: int) -> Tile:
    """The tile for x (images, all channels, positions), so many channels to a group."""
    return strided_tile(channels, x.shape[2], x.stride(1) < x.stride(2))


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()


def _add_up(parts: Tensor | None) -> Tensor | None:
    """The sum of the partial sums, which is only a view where there is one of them."""
    if parts is None or len(parts) == 1:
        return None if parts is None else parts[0]
    return parts.sum(0)
