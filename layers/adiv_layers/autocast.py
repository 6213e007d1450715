"""The effect of autocast on linear maps, for maps that are composed by hand."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Determined once at import: torch.compile could not trace this call before torch 2.7.
_KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "maia", "ipu")
_DEVICES = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would cast x and its weights to; None if it would not."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind not in _DEVICES:
        return None  # autocast ignores float64, and some devices, such as meta, have no autocast
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast does not reduce the precision of sums over x."""
    kind = x.device.type
    if kind not in _DEVICES or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
