"""The entries of tensors by which gradients are recognised, in memory order."""

from torch import Tensor

_RANGES, _RANGE = 16, 64


def sampled_entries(tensor: Tensor) -> Tensor:
    """Return all entries, or 1,024 in evenly spaced ranges, which touch few cache lines."""
    flat = tensor.view(-1) if tensor.is_contiguous() else _flat_in_memory(tensor)
    count = flat.shape[0]
    if count <= _RANGES * _RANGE:
        return flat
    return flat.as_strided((_RANGES, _RANGE), (count // _RANGES, 1), flat.storage_offset())


def _flat_in_memory(tensor: Tensor) -> Tensor:
    """Return all entries in memory order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1).contiguous()
