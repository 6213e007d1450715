"""What autocast does to linear maps, for those that are put together by hand."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Asked once: torch.compile could not trace the question before torch 2.7.
_KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "maia", "ipu")
_DEVICES = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast would cast x and its weights to, None if it would not."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind not in _DEVICES:
        return None  # autocast leaves float64 alone, and the meta device, say, knows none
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast lets sums over x keep their precision."""
    kind = x.device.type
    if kind not in _DEVICES or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
