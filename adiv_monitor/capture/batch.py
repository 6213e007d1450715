"""Sums that tell whether the same batch enters a module again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.capture.hook import has_data
from adiv_monitor.rerun.nested import tensors_in


@torch.no_grad()
def sums_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return Σ_k √k s_k for each tensor in the arguments of a call, with s_k the sum of column k.

    A column is an index of the last dimension. Plain sums would be equal for all one-hot inputs.
    Only dense tensors of real numbers count, the integers among them.
    """
    return tuple(map(_sum, filter(_counts, tensors_in(*args, *kwargs.values()))))


def _counts(tensor: Tensor) -> bool:
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided and has_data(tensor)
    return is_dense and tensor.dtype in _NUMBERS


def _sum(tensor: Tensor) -> Tensor:
    # Summed in a wider type, the tensor would be copied as a whole.
    dims = tuple(range(tensor.ndim - 1))
    wide = torch.float32 if tensor.is_floating_point() and tensor.itemsize == 2 else None
    columns = tensor.sum(dims, dtype=wide) if dims else tensor.reshape(-1)
    widest = torch.float32 if tensor.device.type == "mps" else torch.float64
    numbers = torch.arange(1, columns.numel() + 1, dtype=widest, device=tensor.device)
    return (columns * numbers.sqrt()).sum()


_REALS = torch.float16, torch.bfloat16, torch.float32, torch.float64
_NUMBERS = {*_REALS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
