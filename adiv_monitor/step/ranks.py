"""Communication between the monitors of ranks that train together, without long waits.

It uses the store of the process group instead of collectives. A collective would wait forever for a
rank that has no monitor, raised, or skipped the step, and would interfere with the collectives of
the training. A rank that does not find a message goes on without it.
"""

import hashlib
import re
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Ranks:
    """Channel for numbers from the first rank to the others, through the process group's store.

    A rank that reads before anything was written, or after the store is gone, uses its own numbers.

    Args:
        name: name of the decision, the same in all ranks.
    """

    def __init__(self, name: str) -> None:
        self._key = f"adiv_monitor/{_hashed(name)}"

    def tell(self, *numbers: int) -> None:
        """Publish numbers if this is the first of several ranks."""
        store = _store()
        if store is not None and dist.get_rank() == 0:
            try:
                store.set(self._key, " ".join(map(str, numbers)))
            except RuntimeError:  # the store is gone
                return

    def told(self, *own: int) -> tuple[int, ...]:
        """Return the first rank's last numbers, or `own` if there are none."""
        store = _store()
        if store is None or dist.get_rank() == 0:
            return own
        try:
            heard = _value(store, self._key)
            numbers = () if heard is None else tuple(int(number) for number in heard.split())
        except (RuntimeError, ValueError):  # the store is gone, or something else wrote there
            return own
        return numbers if len(numbers) == len(own) else own

    def end(self) -> None:
        """Remove the numbers if this is the first of several ranks."""
        store = _store()
        if store is not None and dist.get_rank() == 0:
            with suppress(RuntimeError):
                store.delete_key(self._key)


@dataclass
class _Left:
    """The keys of this rank in the store at one meeting.

    Attributes:
        messages: by step, number of pieces of the message.
        missed: keys of points in which not all ranks participated.
        agreed: keys of points in which all ranks participated.
    """

    messages: dict[int, int] = field(default_factory=dict)
    missed: deque[str] = field(default_factory=deque)
    agreed: deque[str] = field(default_factory=deque)


class Exchange:
    """Exchange of messages: contributions of all ranks to the first rank, and its reports back.

    Only monitors that have joined and not left take part. No method but `agree` waits for another
    rank; all raise RuntimeError when the store is gone.

    The store's contents do not grow with the steps, even if ranks are slow or absent: a rank keeps
    the last `_KEPT` of its messages there, and the first rank deletes those it has read. The last
    rank that leaves a meeting deletes all of its keys. A rank that was killed never leaves: its
    keys stay, but do not grow.

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
        self._name = _hashed(name)
        taken = Exchange._attached[self._name]
        self._number = min({*range(len(taken) + 1)} - taken)
        self._key = f"adiv_monitor/{self._name}/{self._number}"
        self._meeting = uuid4().hex  # unique, so that no message of an earlier monitor is read
        self._left: dict[str, _Left] = {}  # by meeting
        _known_store().set(f"{self._key}/{self.rank}", self._meeting)
        if self.rank == 0:
            self._at(self._meeting)
        taken.add(self._number)

    def leave(self) -> None:
        """Leave the exchange, as this rank's monitor is closed."""
        Exchange._attached[self._name].discard(self._number)
        with suppress(RuntimeError):
            _known_store().delete_key(f"{self._key}/{self.rank}")
            for meeting in list(self._left):
                self._leave(meeting)

    def present(self) -> list[int]:
        """Return the other ranks that have a monitor."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        keys = [f"{self._key}/{rank}" for rank in others]
        store = _store()
        if store is None:
            return []
        if store.check(keys):  # one request for all; one by one only if a key is missing
            return others
        return [r for r, key in zip(others, keys, strict=True) if store.check([key])]

    def meeting(self) -> str | None:
        """Return the meeting at which the first rank collects; None if it has no monitor."""
        if self.rank == 0:
            return self._meeting
        store = _store()
        found = None if store is None else _value(store, f"{self._key}/0")
        return None if found is None else found.decode("ascii", "replace")

    def put(self, meeting: str, step: int, message: bytes) -> None:
        """Write this rank's message for a step: its contribution, or the report.

        Args:
            meeting: the meeting.
            step: number of the step.
            message: the message.
        """
        store, left = _known_store(), self._at(meeting)
        box = f"{self._key}/{meeting}/box/{self.rank}"
        pieces = [message[at : at + _PIECE] for at in range(0, len(message), _PIECE)]
        for number, piece in enumerate(pieces):
            store.set(f"{box}/{step}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
        left.messages[step] = len(pieces)
        old = list(left.messages)[:-_KEPT]
        dropped = {step: left.messages.pop(step) for step in old}
        # Written last, so that all pieces it lists are complete.
        store.set(box, " ".join(f"{step}:{count}" for step, count in left.messages.items()))
        for key in _keys(box, dropped):
            store.delete_key(key)

    def get(self, meeting: str, step: int, rank: int) -> bytes | None:
        """Return another rank's message for a step; None if it is not, or no longer, there."""
        keys = self._pieces(meeting, step, rank)
        if keys is None:
            return None
        store = _known_store()
        pieces = []
        for key in keys:
            piece = _value(store, key)
            if piece is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def take(self, step: int, rank: int) -> bytes | None:
        """Read and delete another rank's contribution, if it is there; only for the first rank."""
        part = self.get(self._meeting, step, rank)
        if part is not None:
            for key in self._pieces(self._meeting, step, rank) or ():
                _known_store().delete_key(key)
        return part

    def decline(self, step: int) -> None:
        """Decline all points of a step, so that no other rank waits for this one."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            left, key = self._at(meeting), f"{self._key}/{meeting}/{step}/declined"
            store.set(key, "")
            left.missed.append(key)

    def agree(self, step: int, point: str, patience: float) -> bool:
        """Whether all ranks participate in a point; the result is the same in all ranks.

        Only this method waits. The last rank to arrive writes yes, a rank that has waited too long
        writes no, and the first answer holds. No answer is possible once a point is deleted:
        `_clear` first deletes the count of arrivals, so that no rank can be the last any more.

        Args:
            step: number of the step.
            point: name of the point, the same in all ranks; no rank calls this twice with it.
            patience: largest time to wait, in seconds.
        """
        store, meeting = _store(), self.meeting()
        if store is None or meeting is None:
            return False
        left = self._at(meeting)
        key, declined = (f"{self._key}/{meeting}/{step}/{name}" for name in (point, "declined"))
        if store.compare_set(key, "", _OPEN) == b"no":
            left.missed.append(key)
            return False
        is_last = store.add(f"{key}/came", 1) == self.world
        end = time.monotonic() + patience
        look = 0.0
        # From here on the others may count on this rank, so it reads the answer even after errors.
        try:
            while not is_last and _value(store, key) == _OPEN.encode() and time.monotonic() < end:
                if time.monotonic() > look:
                    if len(self.present()) < self.world - 1 or store.check([declined]):
                        break
                    look = time.monotonic() + _LOOK
                time.sleep(_PAUSE)
        except Exception:
            pass
        except BaseException:
            store.compare_set(key, _OPEN, "no")
            left.missed.append(key)
            raise
        agreed = store.compare_set(key, _OPEN, "yes" if is_last else "no") == b"yes"
        (left.agreed if agreed else left.missed).append(key)
        return agreed

    def refuse(self, step: int, point: str) -> None:
        """Decline a point, so that no rank participates in it."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            left, key = self._at(meeting), f"{self._key}/{meeting}/{step}/{point}"
            if store.compare_set(key, "", "no") == _OPEN.encode():
                store.compare_set(key, _OPEN, "no")
            left.missed.append(key)

    def _at(self, meeting: str) -> _Left:
        """Return this rank's keys at a meeting, after joining if needed; delete unneeded keys."""
        store = _known_store()
        if meeting not in self._left:
            store.add(f"{self._key}/{meeting}/members", 1)
            self._left[meeting] = _Left()
            for old in list(self._left)[:-2]:  # a report of the previous meeting may still be read
                self._leave(old)
        left = self._left[meeting]
        while len(left.missed) > _KEPT:  # a rank this late still gets no, but only after waiting
            _clear(store, left.missed.popleft())
        while len(left.agreed) > 1:  # all ranks reached the last point: none reads earlier ones
            agreed = left.agreed.popleft()
            if self.rank == 0:
                _clear(store, agreed)
        return left

    def _leave(self, meeting: str) -> None:
        """Leave a meeting; the last rank to leave deletes all of its keys."""
        store, left, place = _known_store(), self._left.pop(meeting), f"{self._key}/{meeting}"
        for key in left.missed:
            _clear(store, key)
        if store.add(f"{place}/members", -1) > 0:
            return
        for rank in range(self.world):
            box = f"{place}/box/{rank}"
            for key in (*_keys(box, _contents(store, box)), box):
                store.delete_key(key)
        for key in left.agreed:
            _clear(store, key)
        store.delete_key(f"{place}/members")

    def _pieces(self, meeting: str, step: int, rank: int) -> list[str] | None:
        """Return the keys of the pieces of a message; None if there is no message."""
        box = f"{self._key}/{meeting}/box/{rank}"
        count = _contents(_known_store(), box).get(step)
        return None if count is None else _keys(box, {step: count})


_PAUSE, _LOOK = 0.002, 0.25  # seconds
_PIECE = 2**22  # bytes of one value: torchrun's store takes at most eight million
_KEPT = 8  # number of messages, and of missed points, that each rank keeps
_BOX = re.compile(rb"\d{1,18}:\d{1,4}(?: \d{1,18}:\d{1,4}){0,%d}" % (_KEPT - 1))
_NOTHING, _OPEN = "-", "open"
_GONE = "the process group is gone"


def _value(store: "Store", key: str) -> bytes | None:
    """Return a key's value, or None, without waiting for the key as `get` does."""
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def _contents(store: "Store", box: str) -> dict[int, int]:
    """Return the numbers of pieces of a rank's messages, by step."""
    listed = _value(store, box)
    if listed is None or not _BOX.fullmatch(listed):
        return {}
    pairs = (entry.split(b":") for entry in listed.split())
    return {int(step): int(count) for step, count in pairs}


def _keys(box: str, messages: Mapping[int, int]) -> list[str]:
    """Return the keys of all pieces of these messages."""
    return [f"{box}/{step}/{piece}" for step, n in messages.items() for piece in range(n)]


def _clear(store: "Store", point: str) -> None:
    """Delete a point."""
    store.delete_key(f"{point}/came")
    store.delete_key(point)


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _store() -> "Store | None":
    """Return the default process group's store; None with fewer than two ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._get_default_store()


def _known_store() -> "Store":
    store = _store()
    if store is None:
        raise RuntimeError(_GONE)
    return store
