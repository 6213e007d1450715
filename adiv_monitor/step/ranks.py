"""What ranks that train together tell each other, without any of them ever waiting for long.

Through the store by which they all met, and not by a collective: that would wait for ever for a
rank that has no monitor, raised, or skipped the step, and would come between the collectives of
the training. Whoever looks for what is not there goes on without.
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
    """Passes numbers on from the first rank, through the store by which they all met.

    One that reads before anything is there, or after the store is gone, gets nothing and decides by
    itself.

    Args:
        name: what is decided about, the same in all ranks.
    """

    def __init__(self, name: str) -> None:
        self._key = f"adiv_monitor/{_hashed(name)}"

    def tell(self, *numbers: int) -> None:
        """Where this is the first of several ranks, let the others know."""
        store = _store()
        if store is not None and dist.get_rank() == 0:
            try:
                store.set(self._key, " ".join(map(str, numbers)))
            except RuntimeError:  # nobody is there to be told
                return

    def told(self, *own: int) -> tuple[int, ...]:
        """What the first rank said last; where it said nothing, one's own numbers."""
        store = _store()
        if store is None or dist.get_rank() == 0:
            return own
        try:
            heard = _value(store, self._key)
            numbers = () if heard is None else tuple(int(number) for number in heard.split())
        except (RuntimeError, ValueError):  # the store is gone, or somebody else wrote there
            return own
        return numbers if len(numbers) == len(own) else own

    def end(self) -> None:
        """Where this is the first of several ranks: it says nothing more."""
        store = _store()
        if store is not None and dist.get_rank() == 0:
            with suppress(RuntimeError):
                store.delete_key(self._key)


@dataclass
class _Left:
    """What this rank has left in the store at one meeting.

    Attributes:
        messages: by step, of how many pieces each is.
        missed: keys of points that not all have come to.
        agreed: keys of points that all have come to.
    """

    messages: dict[int, int] = field(default_factory=dict)
    missed: deque[str] = field(default_factory=deque)
    agreed: deque[str] = field(default_factory=deque)


class Exchange:
    """Brings what all ranks know of a step to the first, and its report back to them.

    Only between monitors that are there: each says so when it joins, and when it leaves. No method
    but `agree` waits for another rank; all raise RuntimeError when the store is gone.

    What the store holds does not grow with the steps, whoever is slow or never comes: a rank
    keeps the last `_KEPT` of its messages there, and the first takes away what it has read. With
    the last rank that leaves a meeting everything of it is gone. One that was killed never
    leaves: what it has left there stays, and is no more than that.

    Args:
        name: what is measured, the same in all ranks.

    Attributes:
        rank: of this rank.
        world: how many ranks there are.
    """

    # By name, the numbers of the monitors that are attached in this rank.
    _attached: ClassVar[dict[str, set[int]]] = defaultdict(set)

    def __init__(self, name: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._name = _hashed(name)
        taken = Exchange._attached[self._name]
        self._number = min({*range(len(taken) + 1)} - taken)
        self._key = f"adiv_monitor/{self._name}/{self._number}"
        self._meeting = uuid4().hex  # so that nothing of an earlier monitor is taken for this one's
        self._left: dict[str, _Left] = {}  # by meeting
        _known_store().set(f"{self._key}/{self.rank}", self._meeting)
        if self.rank == 0:
            self._at(self._meeting)
        taken.add(self._number)

    def leave(self) -> None:
        """This rank has no monitor any more."""
        Exchange._attached[self._name].discard(self._number)
        with suppress(RuntimeError):
            _known_store().delete_key(f"{self._key}/{self.rank}")
            for meeting in list(self._left):
                self._leave(meeting)

    def present(self) -> list[int]:
        """The other ranks that have a monitor."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        keys = [f"{self._key}/{rank}" for rank in others]
        store = _store()
        if store is None:
            return []
        if store.check(keys):  # of few at once, one by one only where one is missing
            return others
        return [r for r, key in zip(others, keys, strict=True) if store.check([key])]

    def meeting(self) -> str | None:
        """Where the first rank collects; None if it has no monitor."""
        if self.rank == 0:
            return self._meeting
        store = _store()
        found = None if store is None else _value(store, f"{self._key}/0")
        return None if found is None else found.decode("ascii", "replace")

    def put(self, meeting: str, step: int, message: bytes) -> None:
        """Let others have what this rank has to say of a step: its part, or the report.

        Args:
            meeting: where.
            step: its number.
            message: what it says.
        """
        store, left = _known_store(), self._at(meeting)
        box = f"{self._key}/{meeting}/box/{self.rank}"
        pieces = [message[at : at + _PIECE] for at in range(0, len(message), _PIECE)]
        for number, piece in enumerate(pieces):
            store.set(f"{box}/{step}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
        left.messages[step] = len(pieces)
        old = list(left.messages)[:-_KEPT]
        dropped = {step: left.messages.pop(step) for step in old}
        # Last, so that what it tells of is whole.
        store.set(box, " ".join(f"{step}:{count}" for step, count in left.messages.items()))
        for key in _keys(box, dropped):
            store.delete_key(key)

    def get(self, meeting: str, step: int, rank: int) -> bytes | None:
        """What another rank has said of a step, if it has, and it is still there."""
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
        """The part of another rank, if it has come: nobody else reads it."""
        part = self.get(self._meeting, step, rank)
        if part is not None:
            for key in self._pieces(self._meeting, step, rank) or ():
                _known_store().delete_key(key)
        return part

    def decline(self, step: int) -> None:
        """This rank comes to no point of a step: nobody needs to wait for it there."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            left, key = self._at(meeting), f"{self._key}/{meeting}/{step}/declined"
            store.set(key, "")
            left.missed.append(key)

    def agree(self, step: int, point: str, patience: float) -> bool:
        """Whether all ranks come to a point: then all of them hear so, or none does.

        The only one that waits. Whoever comes last says yes; who has waited for too long says no;
        what was said first holds. Of a point that is gone no more can be said: whoever takes it
        away (`_clear`) first lets it be forgotten who came, so that none can be the last any more.

        Args:
            step: its number.
            point: which, the same in all ranks; none comes to it twice.
            patience: for how many seconds to wait at most.
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
        # From here on the others may count on it: what fails is no reason not to hear their word.
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
        """This rank does not come to a point; nobody does then."""
        store, meeting = _store(), self.meeting()
        if store is not None and meeting is not None:
            left, key = self._at(meeting), f"{self._key}/{meeting}/{step}/{point}"
            if store.compare_set(key, "", "no") == _OPEN.encode():
                store.compare_set(key, _OPEN, "no")
            left.missed.append(key)

    def _at(self, meeting: str) -> _Left:
        """What this rank has left at a meeting, and is of use still; it joins if it must."""
        store = _known_store()
        if meeting not in self._left:
            store.add(f"{self._key}/{meeting}/members", 1)
            self._left[meeting] = _Left()
            for old in list(self._left)[:-2]:  # of the last one a report may still be read
                self._leave(old)
        left = self._left[meeting]
        while len(left.missed) > _KEPT:  # who comes that late is told no all the same, but waits
            _clear(store, left.missed.popleft())
        while len(left.agreed) > 1:  # all have come to the last: nobody looks at others any more
            agreed = left.agreed.popleft()
            if self.rank == 0:
                _clear(store, agreed)
        return left

    def _leave(self, meeting: str) -> None:
        """This rank needs nothing of a meeting any more; the last one to leave clears it."""
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
        """Keys of the pieces of a message; None if there is none."""
        box = f"{self._key}/{meeting}/box/{rank}"
        count = _contents(_known_store(), box).get(step)
        return None if count is None else _keys(box, {step: count})


_PAUSE, _LOOK = 0.002, 0.25  # seconds
_PIECE = 2**22  # bytes of one value: the store of torchrun takes no more than eight million
_KEPT = 8  # messages, and points that not all came to, of each rank
_BOX = re.compile(rb"\d{1,18}:\d{1,4}(?: \d{1,18}:\d{1,4}){0,%d}" % (_KEPT - 1))
_NOTHING, _OPEN = "-", "open"
_GONE = "the process group is gone"


def _value(store: "Store", key: str) -> bytes | None:
    """What a key holds, if it is there: `get` would wait for it."""
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def _contents(store: "Store", box: str) -> dict[int, int]:
    """By step, of how many pieces each of a rank's messages is."""
    listed = _value(store, box)
    if listed is None or not _BOX.fullmatch(listed):
        return {}
    pairs = (entry.split(b":") for entry in listed.split())
    return {int(step): int(count) for step, count in pairs}


def _keys(box: str, messages: Mapping[int, int]) -> list[str]:
    """Keys of all pieces of these messages."""
    return [f"{box}/{step}/{piece}" for step, n in messages.items() for piece in range(n)]


def _clear(store: "Store", point: str) -> None:
    """Take a point away."""
    store.delete_key(f"{point}/came")
    store.delete_key(point)


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _store() -> "Store | None":
    """The store of the ranks that train together; None for one alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d._get_default_store()


def _known_store() -> "Store":
    store = _store()
    if store is None:
        raise RuntimeError(_GONE)
    return store
