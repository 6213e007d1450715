"""Communication between the monitors of ranks that train together, without long waits.

It uses the store of the process group instead of collectives. A collective would wait forever for a
rank that has no monitor, raised, or skipped the step, and would interfere with the collectives of
the training. A rank that does not find a message goes on without it.
"""

import hashlib
import time
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Ranks:
    """The monitors of one name in all ranks. They meet in the store, where rank 0 names a place.

    The store's contents do not grow with the steps: a rank keeps its last message there, and its
    last points. The last rank that leaves deletes all of them. A rank that was killed never leaves.

    All methods raise RuntimeError if the store is gone, or if rank 0 has no monitor. Only `agree`
    waits.

    Args:
        name: name of the measured model, the same in all ranks.

    Attributes:
        rank: this rank.
        world: number of ranks.
    """

    # Numbers of the monitors attached in this rank, by name.
    _attached: ClassVar[dict[str, set[int]]] = defaultdict(set)

    def __init__(self, name: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._taken = Ranks._attached[name]
        self._number = min({*range(len(self._taken) + 1)} - self._taken)
        self._key = f"{_key_of(name)}/{self._number}"
        self._met = ""
        self._missed: deque[str] = deque()  # points in which not all ranks participated
        self._agreed: deque[str] = deque()  # the last point in which all did
        # A name that is unique, so that no message of an earlier monitor is read.
        _store().set(f"{self._key}/{self.rank}", uuid4().hex)
        if self.rank == 0:
            self._place()
        self._taken.add(self._number)

    def _place(self) -> str:
        """Return the place where the ranks meet."""
        if not self._met:
            named = _value(f"{self._key}/0")
            if named is None:
                raise RuntimeError("rank 0 has no monitor")
            self._met = f"{self._key}/{named.decode('ascii', 'replace')}"
            _store().add(f"{self._met}/members", 1)
        return self._met

    def leave(self) -> None:
        """Leave the others, as this rank's monitor is closed."""
        self._taken.discard(self._number)
        with suppress(RuntimeError):
            store, place = _store(), self._met
            store.delete_key(f"{self._key}/{self.rank}")
            _clear(self._missed)
            if place and store.add(f"{place}/members", -1) <= 0:
                _clear(self._agreed)
                for rank in range(self.world):
                    for key in (*self._pieces(rank)[1], f"{place}/{rank}"):
                        store.delete_key(key)
                store.delete_key(f"{place}/members")

    def present(self) -> list[int]:
        """Return the other ranks that have a monitor."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        keys = [f"{self._key}/{rank}" for rank in others]
        store = _store()
        if store.check(keys):  # one request for all; one by one only if a key is missing
            return others
        return [rank for rank, key in zip(others, keys, strict=True) if store.check([key])]

    def put(self, step: int, message: bytes) -> None:
        """Write this rank's message for a step, in place of its last one."""
        store, box = _store(), f"{self._place()}/{self.rank}"
        _, old = self._pieces(self.rank)
        pieces = [message[at : at + _PIECE] for at in range(0, len(message), _PIECE)]
        for number, piece in enumerate(pieces):
            store.set(f"{box}/{step}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
        store.set(box, f"{step} {len(pieces)}")  # last, so that all pieces are complete
        for key in old:
            store.delete_key(key)

    def get(self, step: int, rank: int) -> bytes | None:
        """Return another rank's message for a step; None if it is not, or no longer, there."""
        written, keys = self._pieces(rank)
        pieces = [_value(key) for key in keys] if written == step else [None]
        known = [piece for piece in pieces if piece is not None]
        return b"".join(known) if len(known) == len(pieces) else None

    def _pieces(self, rank: int) -> tuple[int, list[str]]:
        """Return the step of a rank's message, and the keys of its pieces."""
        box = f"{self._place()}/{rank}"
        listed = (_value(box) or b"-1 0").split()
        step, count = map(int, listed)
        return step, [f"{box}/{step}/{piece}" for piece in range(count)]

    def agree(self, step: int, point: str, patience: float) -> bool:
        """Whether all ranks participate in a point; the result is the same in all ranks.

        The last rank to arrive writes yes, a rank that has waited too long writes no, and the first
        answer holds. No answer is possible once a point is deleted: the count of arrivals goes
        first, so that no rank can be the last any more.

        Args:
            step: number of the step.
            point: name of the point, the same in all ranks; no rank calls this twice with it.
            patience: largest time to wait, in seconds.
        """
        # First: once this rank has come, an error must not keep it from what all agree on.
        _clear(self._agreed, 1)  # all have come to the last one, so none reads those before it
        _clear(self._missed, _KEPT)  # a rank this late still gets no, but only after waiting
        store, key = _store(), f"{self._place()}/{step}/{point}"
        store.compare_set(key, "", _OPEN)
        is_last = store.add(f"{key}/came", 1) == self.world
        end = time.monotonic() + patience
        with suppress(Exception):  # the answer counts
            while not is_last and _value(key) == _OPEN.encode() and time.monotonic() < end:
                if len(self.present()) < self.world - 1:
                    break
                time.sleep(PAUSE)
        agreed = store.compare_set(key, _OPEN, "yes" if is_last else "no") == b"yes"
        (self._agreed if agreed else self._missed).append(key)
        return agreed


PAUSE = 0.002  # seconds
_PIECE = 2**22  # bytes of one value: torchrun's store takes at most eight million
_KEPT = 8  # number of missed points that each rank keeps
_NOTHING, _OPEN = "-", "open"


def _store() -> "Store":
    """Return the default process group's store, which it has with several ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        raise RuntimeError("the process group is gone")
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._get_default_store()


def _value(key: str) -> bytes | None:
    """Return a key's value, or None, without waiting for the key as `get` does."""
    found: bytes = _store().compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def _clear(points: deque[str], kept: int = 0) -> None:
    """Delete the oldest points."""
    while len(points) > kept:
        key = points.popleft()
        _store().delete_key(f"{key}/came")
        _store().delete_key(key)


def _key_of(name: str) -> str:
    return f"adiv_monitor/{hashlib.sha256(name.encode()).hexdigest()}"
