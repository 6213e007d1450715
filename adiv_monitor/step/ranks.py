"""What one process decides, for all that train together, without any of them ever waiting."""

import hashlib
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Ranks:
    """Passes numbers on from the first process, through the store by which they all met.

    Not by a collective: that would wait for ever for a process without a monitor. One that reads
    before anything is there, or after the store is gone, gets nothing and decides by itself.

    Args:
        name: what is decided about, the same in all processes.
    """

    def __init__(self, name: str) -> None:
        self._key = f"adiv_monitor/{hashlib.sha256(name.encode()).hexdigest()}"

    def tell(self, *numbers: int) -> None:
        """Where this is the first of several processes, let the others know."""
        store = _store()
        if store is not None and dist.get_rank() == 0:
            try:
                store.set(self._key, " ".join(map(str, numbers)))
            except RuntimeError:  # nobody is there to be told
                return

    def told(self, *own: int) -> tuple[int, ...]:
        """What the first process said last; where it said nothing, one's own numbers."""
        store = _store()
        if store is None or dist.get_rank() == 0:
            return own
        try:
            heard = store.get(self._key) if store.check([self._key]) else None
        except RuntimeError:
            return own
        return own if heard is None else tuple(int(number) for number in heard.split())


def _store() -> "Store | None":
    """The store of the processes that train together; None for one alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._get_default_store()
