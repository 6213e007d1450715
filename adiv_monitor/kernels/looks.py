# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"
"""One pass over the rows of a tensor: squares of all rows, their sum, and a copy of some rows."""

import torch
import triton
import triton.language as tl
from adiv_layers.kernels.launch import divide_up, power_of_two, run, workers
from torch import Tensor

from adiv_monitor.kernels.views import as_images

_TILE = 2048


@triton.jit
def look_kernel(
    x, squares, sums, taken, chosen, positions, width, tiles, steps, count,
    x_image, x_position, x_channel, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute squares of rows and sums of a tile's rows; further programs copy rows.

    Outputs that are None are skipped.
    """
    program = tl.program_id(0).to(tl.int64)
    if program < steps:
        image = program // tiles
        position = (program % tiles) * POSITIONS + tl.arange(0, POSITIONS)
        within = position < positions
        place = image * x_image + position.to(tl.int64) * x_position
        square = tl.zeros((POSITIONS, CHANNELS), tl.float32)
        for start in range(0, width, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            among = channel < width
            own = x + place[:, None] + channel.to(tl.int64)[None, :] * x_channel
            mask = within[:, None] & among[None, :]
            value = tl.load(own, mask=mask, other=0.0).to(tl.float32)
            square += value * value
            if sums is not None:
                tl.store(sums + program * width + channel, tl.sum(value, 0), mask=among)
        if squares is not None:
            of_rows = tl.sum(square, 1)
            tl.store(squares + image * positions + position, of_rows, mask=within)
    elif taken is not None:
        number = (program - steps) * POSITIONS + tl.arange(0, POSITIONS)
        within = number < count
        if chosen is not None:
            row = tl.load(chosen + number, mask=within, other=0)
        else:
            row = number.to(tl.int64)
        place = (row // positions) * x_image + (row % positions) * x_position
        for start in range(0, width, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            own = x + place[:, None] + channel.to(tl.int64)[None, :] * x_channel
            mask = within[:, None] & (channel < width)[None, :]
            value = tl.load(own, mask=mask, other=0.0).to(tl.float32)
            here = taken + number.to(tl.int64)[:, None] * width + channel[None, :]
            tl.store(here, value, mask=mask)


def look(
    x: Tensor,
    *,
    chosen: Tensor | None = None,
    rows: int | None = None,
    squares: bool = False,
    sums: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """Return squares, Σ_r x_r, and some rows of x (..., channels), all float32.

    Args:
        x: tensor, read once.
        chosen: indices of the rows to copy, int64; None: the first rows.
        rows: number of rows to copy; None: no copy.
        squares: whether to return ‖x_r‖² of every row, (rows,).
        sums: whether to return the sum of all rows, (channels,).

    Returns:
        The three results, None for each that was not requested; None if `x` can't be viewed as
        images.
    """
    view = as_images(x)
    if view is None:
        return None
    images, positions, width = view.shape
    tile, channels = _tile(view)
    tiles = divide_up(positions, tile)
    steps = images * tiles if squares or sums else 0
    found = view.new_empty(images * positions, dtype=torch.float32) if squares else None
    parts = view.new_empty((steps, width), dtype=torch.float32) if sums else None
    taken = None if rows is None else view.new_empty((rows, width), dtype=torch.float32)
    copied = rows or 0
    arguments = (
        *(found, parts, taken, chosen, positions, width, tiles, steps, copied, *view.stride()),
    )
    grid = (steps + divide_up(copied, tile),)
    run(look_kernel, grid, view, view, *arguments, POSITIONS=tile, CHANNELS=channels)
    return found, None if parts is None else parts.sum(0), taken


def _tile(view: Tensor) -> tuple[int, int]:
    """Return positions and channels of a tile, longest in the direction of contiguous memory."""
    images, positions, width = view.shape
    rows = images * positions
    if view.stride(2) <= view.stride(1):  # even few rows should keep many programs busy
        tile = min(16, power_of_two(divide_up(rows, workers(view, rows, 1))))
        return tile, min(power_of_two(width), _TILE // tile)
    tile = min(128, power_of_two(positions))
    return tile, min(power_of_two(width), _TILE // tile)
