"""Launches of kernels: size of the tiles, number of programs, device and failures."""

import functools
import math
import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
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

    def options(self) -> dict[str, int]:
        """Return the tile as the last parameters of a kernel, and its warps."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps}


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


class Launch(NamedTuple):
    """A kernel and all that it is given besides tensors.

    Attributes:
        kernel: its first parameters are the tensors, then the numbers, then the constants.
        grid: number of programs in each direction.
        numbers: plain numbers after the tensors.
        constants: those known to the compiler, by name and in order, then the number of warps.
        makes: shapes of results that follow the given tensors, in the dtype of the last of these;
            None: that result is skipped.
    """

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    makes: tuple[tuple[int, ...] | None, ...] = ()


_MOST = 4096  # launches that are kept: networks whose sizes always change begin anew
_starters: dict[tuple[Any, ...], "_Starter"] = {}
_broken: set[tuple[Any, ...]] = set()  # launches that failed and are not tried again


def launches(plan: Callable[..., Launch]) -> Callable[..., list[Any]]:
    """Return a function that starts the kernel of a plan and returns the results that it makes.

    It is given every tensor of the kernel by its place, None for one that is missing. The plan is
    asked once for all tensors that are alike: in shape, strides, dtype, device and alignment to 16
    bytes, which is all that a compiled kernel depends on. A caller that knows what determines this
    gives it as `like`, since to look at every tensor takes longer than to start the kernel.
    """

    @functools.wraps(plan)
    def launch(*tensors: Tensor | None, like: Hashable = None, **settings: Any) -> list[Any]:
        key = (plan, like or alike(*tensors), *settings.items())
        starter = _starters.get(key)
        if starter is None:
            if len(_starters) >= _MOST:
                _starters.clear()
            starter = _starters[key] = _Starter(plan(*tensors, **settings))
        last: Any = tensors[-1]
        made = [None if s is None else last.new_empty(s) for s in starter.launch.makes]
        starter.start(*tensors, *made)
        return made

    return launch


def alike(*tensors: Tensor | None) -> tuple[object, ...]:
    """Return what a kernel depends on in these tensors, besides their numbers."""
    return tuple(
        [
            x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
            for x in tensors
        ]
    )


class _Starter:
    """Starts one kernel on tensors that are alike: the first time by Triton's launcher.

    That launcher binds, specialises and looks up in each call what depends on the same tensors'
    attributes, some 60 calls of Python functions; from the second time on none is needed.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.start: Callable[..., None] = self._load

    def _load(self, *tensors: Tensor | None) -> None:
        """Compile and start the kernel on the device of the first tensor.

        Raises:
            KernelError: the kernel does not start; one warning states the reason.
        """
        kernel, grid, numbers, constants, _ = self.launch
        device = tensors[0].device  # type: ignore[union-attr]
        if 0 in grid:
            return
        constants["enable_fp_fusion"] = True  # explicit, because Triton plans to change the default
        same = (kernel, device, *constants.items())
        if same in _broken:
            raise KernelError
        given = (*tensors, *numbers)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    _refuse_to_load(kernel, grid, given, constants)
                compiled = kernel[grid](*given, **constants)
                self.start = self._directly(compiled) or self._load
        except Exception as cause:
            _broken.add(same)
            warnings.warn(
                f"adiv_layers: {getattr(kernel, '__name__', kernel)} does not start on "
                f"{device} ({cause!r}); plain PyTorch is used instead, from now on.",
                RuntimeWarning,
                stacklevel=3,
            )
            raise KernelError from cause

    def _directly(self, compiled: Any) -> Callable[..., None] | None:
        """Return what starts the compiled kernel; None: it is interpreted, or Triton is below 3.3.

        Hooks of Triton's own profiler are not called.
        """
        kernel, grid, numbers, constants, _ = self.launch
        if compiled is None or "constexpr" not in compiled.src.signature.values():
            return None
        from triton.runtime import driver

        rest = *numbers, *(constants[name] for name in kernel.arg_names if name in constants)
        programs, active = (*grid, 1, 1)[:3], driver.active
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        index = active.get_current_device()

        def here(*tensors: Tensor | None) -> None:
            stream = active.get_current_stream(index)
            run(*programs, stream, function, packed, None, None, None, *tensors, *rest)

        def there(*tensors: Tensor | None) -> None:
            with torch.cuda.device(index):
                here(*tensors)

        return here if torch.cuda.device_count() < 2 else there


def _refuse_to_load(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Raise if the kernel is not loaded yet: loading it now would end the CUDA graph capture."""
    compiled = kernel.warmup(*arguments, grid=grid, **constants)
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
