"""How large a kernel's tiles are, how many programs it gets, and on which device it starts."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The most elements of a row that one program keeps in registers; a wider row is read twice, the
# second time from cache. In float64 every element takes two registers.
_ROW = {torch.float32: 16384, torch.float64: 8192}
_TILE = 4096  # elements of a tile: 16 per thread with 8 warps
_ACROSS, _ALONG = 1024, 128  # and the most of them in the direction that memory runs


class Rows(NamedTuple):
    """Tile of a kernel over rows: so many whole rows, or one row in blocks."""

    rows: int
    block: int
    warps: int


class Tile(NamedTuple):
    """Tile of a kernel over positions and channels."""

    positions: int
    channels: int
    warps: int


def rows_tile(width: int, dtype: torch.dtype) -> Rows:
    """The tile for rows of this width whose sums are taken in this dtype."""
    limit = _ROW[dtype]
    block = max(16, power_of_two(width)) if width <= limit else limit // 2
    rows = max(1, 2048 // block)
    return Rows(rows, block, _warps(rows * block, 16))


def strided_tile(channels: int, positions: int, channels_fast: bool) -> Tile:
    """The tile for channels × positions, long in the direction that memory runs."""
    if channels_fast:
        across = min(power_of_two(channels), _ACROSS)
        along = min(power_of_two(positions), _TILE // across)
    else:
        along = min(power_of_two(positions), _ALONG)
        across = min(power_of_two(channels), _TILE // along)
    return Tile(along, across, _warps(along * across, 8))


def workers(tensor: Tensor, steps: int, columns: int) -> int:
    """Programs that share the steps of one column of tiles: about four on every multiprocessor.

    More would only lengthen the partial sums, of which each program writes one row.
    """
    return max(1, min(steps, divide_up(4 * _multiprocessors(tensor.device), columns)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; without one, in the interpreter, a small number."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run(
    kernel: Any, grid: tuple[int, ...], anchor: Tensor, *arguments: Any, **options: Any
) -> None:
    """Start a kernel on the anchor's device, which need not be the current one."""
    if 0 in grid:
        return
    with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]
        # Said outright, because Triton means to change what it does when it is not.
        kernel[grid](*arguments, enable_fp_fusion=True, **options)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def divide_up(a: int, b: int) -> int:
    """Quotient of a and b, rounded up."""
    return -(-a // b)


def _warps(elements: int, most: int) -> int:
    return max(1, min(most, elements // 512))
