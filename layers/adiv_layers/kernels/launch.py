"""Launches of kernels: size of the tiles, number of programs, device and failures."""

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The most elements of a row that one program keeps in registers. A wider row is read twice, the
# second time from cache. In float64 every element takes two registers.
_ROW = {torch.float32: 16384, torch.float64: 8192}
_TILE = 4096  # the most elements of a tile over positions and channels
_ACROSS, _ALONG = 1024, 128  # and the most in the contiguous direction


class Rows(NamedTuple):
    """The tile of a kernel over rows: several whole rows, or one row in blocks."""

    rows: int
    block: int
    warps: int


class Tile(NamedTuple):
    """The tile of a kernel over positions and channels."""

    positions: int
    channels: int
    warps: int


def rows_tile(width: int, dtype: torch.dtype) -> Rows:
    """Return the tile for rows of this width whose sums are computed in this dtype."""
    limit = _ROW[dtype]
    block = max(16, power_of_two(width)) if width <= limit else limit // 2
    # Work once per row costs a thread as much as 16 elements; with 32 it holds two operands.
    each = 32 if dtype == torch.float32 and block >= width else 16
    rows = max(1, 32 * each // block)
    return Rows(rows, block, max(1, rows * block // (32 * each)))


def strided_tile(channels: int, positions: int, channels_fast: bool, unit: int) -> Tile:
    """Return the tile for channels × positions, longest in the contiguous direction.

    A thread has 32 elements, or 16 in a tall tile, where more of them need an address of their own
    in a register. If fewer than 4 elements are contiguous, each needs an address, so a thread takes
    half as many.
    """
    if channels_fast:
        across = min(power_of_two(channels), _ACROSS)
        along = min(power_of_two(positions), _TILE // across)
    else:
        along = min(power_of_two(positions), _ALONG)
        across = min(power_of_two(channels), _TILE // along)
    tall = not channels_fast or along >= 16
    warps = max(1, along * across // (512 if tall else 1024))
    if unit < 4:
        along, across = (along // 2, across) if channels_fast else (along, across // 2)
    return Tile(max(1, along), max(1, across), warps)


def workers(tensor: Tensor, steps: int, columns: int) -> int:
    """Return the number of programs for one column of tiles: about four per multiprocessor.

    More programs would only add partial sums, of which each program writes one row.
    """
    return max(1, min(steps, 4 * _multiprocessors(tensor.device) // columns))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; in the interpreter, without a device, 1."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class KernelError(RuntimeError):
    """Error of a kernel that can't be compiled, loaded or started; plain PyTorch can replace it."""


_broken: set[tuple[Any, ...]] = set()  # launches that failed and are not tried again


def run(
    kernel: Any, grid: tuple[int, ...], anchor: Tensor, *arguments: Any, **options: Any
) -> None:
    """Start a kernel on the anchor's device, which need not be the current one.

    Raises:
        KernelError: the kernel does not start; one warning states the reason.
    """
    if 0 in grid:
        return
    options["enable_fp_fusion"] = True  # explicit, because Triton plans to change the default
    if _broken and (kernel, anchor.device, *options.items()) in _broken:
        raise KernelError
    try:
        if anchor.is_cuda:
            with torch.cuda.device_of(anchor):  # type: ignore[no-untyped-call]
                if torch.cuda.is_current_stream_capturing():
                    _refuse_to_load(kernel, grid, arguments, options)
                kernel[grid](*arguments, **options)
        else:
            kernel[grid](*arguments, **options)
    except Exception as cause:
        _broken.add((kernel, anchor.device, *options.items()))
        warnings.warn(
            f"adiv_layers: {getattr(kernel, '__name__', kernel)} does not start on "
            f"{anchor.device} ({cause!r}); plain PyTorch is used instead, from now on.",
            RuntimeWarning,
            stacklevel=2,
        )
        raise KernelError from cause


def _refuse_to_load(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise if the kernel is not loaded yet: loading it now would end the CUDA graph capture."""
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    if compiled is None or compiled.module is None:
        raise RuntimeError(
            "not loaded when a CUDA graph was captured; run the same step once before the capture"
        )


def unit_of(*sizes: int) -> int:
    """Return the largest power of two, at most 8, that divides all sizes."""
    return math.gcd(8, *sizes)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def divide_up(a: int, b: int) -> int:
    """Return the quotient of a and b, rounded up."""
    return -(-a // b)
