"""What processes that train together tell each other, without any of them ever waiting for long.

Through the store by which they all met, and not by a collective: that would wait for ever for a
process that has no monitor, raised, or skipped the step, and would come between the collectives of
the training. Whoever looks for what is not there goes on without.
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
    """Passes numbers on from the first process, through the store by which they all met.

    One that reads before anything is there, or after the store is gone, gets nothing and decides by
    itself.

    Args:
        name: what is decided about, the same in all processes.
    """

    def __init__(self, name: str) -> None:
        self._key = f"adiv_monitor/{_hashed(name)}"

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


class Exchange:
    """Brings what all processes know of a step to the first, and its report back to them.

    Only between monitors that are there: each says so when it joins, and when it leaves. No method
    but `agree` waits for another process; all raise RuntimeError when the store is gone.

    Args:
        name: what is measured, the same in all processes.

    Attributes:
        rank: of this process.
        world: how many processes there are.
    """

    # By name, the numbers of the monitors that are attached in this process.
    _attached: ClassVar[dict[str, set[int]]] = defaultdict(set)

    def __init__(self, name: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._name = _hashed(name)
        taken = Exchange._attached[self._name]
        self._number = min({*range(len(taken) + 1)} - taken)
        self._key = f"adiv_monitor/{self._name}/{self._number}"
        self._meeting = uuid4().hex  # so that nothing of an earlier monitor is taken for this one's
        self._published: deque[str] = deque()
        self._agreed: list[str] = []  # where all came last
        self._write(f"{self._key}/{self.rank}", self._meeting)
        taken.add(self._number)

    def leave(self) -> None:
        """This process has no monitor any more."""
        Exchange._attached[self._name].discard(self._number)
        with suppress(RuntimeError):
            self._write(f"{self._key}/{self.rank}", "")

    def present(self) -> list[int]:
        """The other processes that have a monitor."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        keys = [f"{self._key}/{rank}" for rank in others]
        store = _store()
        if store is None:
            return []
        if not store.check(keys):  # of few at once, one by one only where one is missing
            others = [r for r, key in zip(others, keys, strict=True) if store.check([key])]
        return [rank for rank in others if store.get(f"{self._key}/{rank}")]

    def meeting(self) -> str | None:
        """Where the first process collects; None if it has no monitor."""
        store, key = _store(), f"{self._key}/0"
        if self.rank == 0:
            return self._meeting
        return (store.get(key).decode() or None) if store and store.check([key]) else None

    def put(self, meeting: str, step: int, part: bytes) -> None:
        """Let the first process have this one's part of a step."""
        self._write(f"{self._key}/{meeting}/{step}/{self.rank}", part)

    def take(self, step: int, rank: int) -> bytes | None:
        """The part of another process, if it has come."""
        return self._read(f"{self._key}/{self._meeting}/{step}/{rank}", remove=True)

    def decline(self, step: int) -> None:
        """This process comes to no point of a step: nobody needs to wait for it there."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            store.set(f"{self._key}/{meeting}/{step}/declined", "")

    def agree(self, step: int, point: str, patience: float) -> bool:
        """Whether all processes come to a point: then all of them hear so, or none does.

        The only one that waits. Whoever comes last says yes; who has waited for too long says no;
        what was said first holds.

        Args:
            step: its number.
            point: which, the same in all processes; none comes to it twice.
            patience: for how many seconds to wait at most.
        """
        store, meeting = _store(), self.meeting()
        if store is None or meeting is None:
            return False
        key, declined = (f"{self._key}/{meeting}/{step}/{name}" for name in (point, "declined"))
        is_last = store.add(f"{key}/came", 1) == self.world
        end = time.monotonic() + patience
        look = 0.0
        try:
            while not is_last and not store.check([key]) and time.monotonic() < end:
                if time.monotonic() > look:
                    if len(self.present()) < self.world - 1 or store.check([declined]):
                        break
                    look = time.monotonic() + _LOOK
                time.sleep(_PAUSE)
        except Exception:  # it has come: what this means for all is said below
            pass
        except BaseException:
            store.compare_set(key, "", "no")
            raise
        agreed = store.compare_set(key, "", "yes" if is_last else "no") == b"yes"
        if agreed and self.rank == 0:
            for old in self._agreed:  # all have come here, so nobody looks there any more
                store.delete_key(old)
            self._agreed = [key, f"{key}/came"]
        return agreed

    def refuse(self, step: int, point: str) -> None:
        """This process does not come to a point; nobody does then, unless all had come."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            store.compare_set(f"{self._key}/{meeting}/{step}/{point}", "", "no")

    def publish(self, step: int, report: bytes) -> None:
        """Let the other processes have the report of a step."""
        key = f"{self._key}/{self._meeting}/{step}/report"
        self._write(key, report)
        self._published.append(key)
        if len(self._published) > _KEPT_REPORTS:
            self._write(self._published.popleft(), "")

    def published(self, meeting: str, step: int) -> bytes | None:
        """The report of a step, if it is there."""
        return self._read(f"{self._key}/{meeting}/{step}/report")

    def _write(self, key: str, data: bytes | str) -> None:
        store = _store()
        if store is None:
            raise RuntimeError(_GONE)
        if isinstance(data, bytes):
            pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
            for number, piece in enumerate(pieces):
                store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
            data = str(len(pieces))
        store.set(key, data)  # last: what is there is whole

    def _read(self, key: str, *, remove: bool = False) -> bytes | None:
        # Never removed by others than who reads it: `get` would wait for what is not there.
        store = _store()
        if store is None:
            raise RuntimeError(_GONE)
        if not store.check([key]) or not (count := store.get(key)):
            return None
        keys = [f"{key}/{number}" for number in range(int(count))]
        data = b"".join(store.get(piece) for piece in keys)
        for each in (key, *keys) if remove else ():
            store.delete_key(each)
        return data


_PAUSE, _LOOK = 0.002, 0.25  # seconds
_PIECE = 2**22  # bytes of one value: the store of torchrun takes no more than eight million
_KEPT_REPORTS = 8
_GONE = "the process group is gone"


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _store() -> "Store | None":
    """The store of the processes that train together; None for one alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._get_default_store()
