"""Reports for all ranks: contributions are gathered at the first rank, which merges them.

Every rank reads its measured step as its next optimizer step begins: the gradients of all have been
averaged by then, so all are there. Each puts its contribution into the store; the first rank merges
them and puts the report there. It waits for at most `PATIENCE` seconds, and for a rank that was not
heard in that time only briefly. A rank that ends, or has no monitor, delays the others no more.

The store of the process group is used instead of collectives. A collective would wait forever for a
rank that has no monitor, raised, or skipped the step, and would interfere with the collectives of
the training.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import numpy as np
import torch.distributed as dist

from adiv_monitor.capture.weights.shards import world_size
from adiv_monitor.report import StepReport
from adiv_monitor.step import messages
from adiv_monitor.step.gradient_check import settled
from adiv_monitor.step.merge import merge_ranks, prepared
from adiv_monitor.step.messages import RankContribution

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE, _SHORT = 10.0, 0.5  # seconds
_PAUSE = 0.002  # seconds between two looks
_PIECE = 2**22  # bytes of one value: torchrun's store takes at most eight million
_NOTHING, _OPEN = "-", "open"
_STOP = "stop"  # a point of a step in which all ranks participate, or none


@dataclass(eq=False)
class Ranks:
    """The monitors of one name in all ranks. They meet in the store, where rank 0 names a place.

    The store holds the last message of each rank, and a few bytes for each point in which they have
    agreed or not. The last rank that leaves deletes the messages. A rank that was killed never
    leaves.

    Attributes:
        max_rows: number of sampled rows per layer, of all ranks together.
        generator: the monitor's own random generator.
        rank: this rank.
        world: number of ranks.
        patience: largest time to wait for a report, in seconds; None: `PATIENCE`.
    """

    max_rows: int | None
    generator: np.random.Generator
    rank: int = 0
    world: int = 1
    _key: str = ""  # of their name; "": this one has not joined others
    _met: str = ""  # the place, once rank 0 has named it
    patience: float | None = None
    _agreed: bool = True  # whether the last attempt to agree succeeded
    _silent: set[int] = field(default_factory=set)  # ranks that did not answer in time
    _covers_all: bool = True  # whether the last report does, and all ranks have it
    _leaves: Callable[[], object] = list
    # Numbers of the monitors attached in this rank, by name.
    _attached: ClassVar[dict[str, set[int]]] = defaultdict(set)

    def join(self, name: str) -> None:
        """Join the monitors of the other ranks, as this one is attached.

        Args:
            name: name of the measured model, the same in all ranks.
        """
        if world_size() == 1:
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        taken, named = Ranks._attached[name], hashlib.sha256(name.encode()).hexdigest()
        number = min({*range(len(taken) + 1)} - taken)
        taken.add(number)
        self._leaves = partial(taken.discard, number)
        self._key = f"adiv_monitor/{named}/{number}"
        if self.rank:  # ranks should not all sample the same rows
            chance = self.generator.bit_generator
            assert isinstance(chance, np.random.PCG64)
            chance.advance(self.rank << 96)
        # A name that is unique, so that no message of an earlier monitor is read.
        _store().set(f"{self._key}/{self.rank}", uuid4().hex)
        if self.rank == 0:  # a member from the beginning: who leaves before deletes nothing
            self._place()

    def leave(self) -> None:
        """Leave the other ranks, as the monitor is closed."""
        if not self._key:
            return
        self._leaves()
        with suppress(RuntimeError):  # raised if the store is gone
            store = _store()
            store.delete_key(f"{self._key}/{self.rank}")
            if self._met and store.add(f"{self._met}/members", -1) <= 0:
                for rank in range(self.world):
                    for key in (*self._pieces(rank)[1], self._box(rank)):
                        store.delete_key(key)
                store.delete_key(f"{self._met}/members")
        self._key = ""

    @property
    def is_alone(self) -> bool:
        """Whether no other rank trains, or trained when the monitor was attached."""
        return not self._key and world_size() == 1

    # --- reports ----------------------------------------------------------------------------------

    def report(
        self, part: RankContribution, complete: Callable[[RankContribution], StepReport]
    ) -> tuple[StepReport, bool]:
        """Return the report to which this rank contributes, and whether this rank is to write it.

        Args:
            part: the contribution.
            complete: makes the report of a step from a contribution, of one rank or merged, in the
                units of the optimizer's gradient.
        """
        if not self._key:
            return complete(replace(part, sums=settled(part.sums))), True
        step, is_gone = part.report.step, False
        sums = prepared(part.sums, self.max_rows, self.world, self.generator)
        parts, heard = {self.rank: replace(part, sums=sums)}, None
        try:
            if self.rank:
                self.put(step, messages.encode(parts[self.rank]))
                for message in self._messages(step, [0]).values():
                    heard = messages.decode_report(message)
            else:
                found = self._messages(step, range(1, self.world))
                parts |= {rank: messages.decode(found[rank]) for rank in sorted(found)}
        except RuntimeError:  # the store is gone, or the first rank has no monitor
            is_gone = True
        if heard is not None and self.rank in heard[1]:
            (report, covered), writes = heard, False
        else:  # the first rank trains something else, or is late
            whole, covered = merge_ranks(parts, self.world, self.max_rows)
            report, writes = complete(whole), not self.rank or is_gone or heard is not None
            if not self.rank:
                with suppress(RuntimeError):
                    self.put(step, messages.encode_report(report, covered))
        self._covers_all = len(covered) == self.world
        return report, writes

    def _messages(self, step: int, expected: Collection[int]) -> dict[int, bytes]:
        """Return the messages of ranks for a step, once all are there or time is up."""
        patience = PATIENCE if self.patience is None else self.patience
        begin, found, missing = time.monotonic(), dict[int, bytes](), {*expected}
        while True:
            present = self.present()  # looked at first: who leaves has written before
            for rank in sorted(missing):
                if (message := self.get(step, rank)) is not None:
                    found[rank] = message
            missing -= found.keys()
            self._silent -= found.keys()
            late, waited = missing.intersection(present), time.monotonic() - begin
            if waited > patience:
                self._silent |= late
                late = set()
            elif waited > _SHORT:
                late -= self._silent
            if not late:
                return found
            time.sleep(_PAUSE)

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
        store, box, old = _store(), self._box(self.rank), self._pieces(self.rank)[1]
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

    def _place(self) -> str:
        """Return the place where the ranks meet.

        Raises:
            RuntimeError: rank 0 has no monitor, or the store is gone.
        """
        if not self._met:
            if (named := _value(f"{self._key}/0")) is None:
                raise RuntimeError("rank 0 has no monitor")
            self._met = f"{self._key}/{named.decode('ascii', 'replace')}"
            _store().add(f"{self._met}/members", 1)
        return self._met

    def _box(self, rank: int) -> str:
        return f"{self._place()}/{rank}"

    def _pieces(self, rank: int) -> tuple[int, list[str]]:
        """Return the step of a rank's message, and the keys of its pieces."""
        box = self._box(rank)
        step, count = map(int, (_value(box) or b"-1 0").split())
        return step, [f"{box}/{step}/{piece}" for piece in range(count)]

    # --- agreement --------------------------------------------------------------------------------

    def all_stop(self, step: int) -> bool:
        """Whether all ranks have the same report of this step, and stop because of it."""
        return self._covers_all and self.agree(step, _STOP)

    def agree(self, step: int, point: str) -> bool:
        """Whether all ranks participate in a point of a step, so that a collective may follow.

        The result is the same in all ranks. The last rank to arrive writes yes, a rank that has
        waited too long writes no, and the first answer holds. After a point in which some did not
        participate, ranks wait only briefly.

        Args:
            step: number of the step.
            point: name of the point, the same in all ranks; no rank calls this twice with it.
        """
        if self.is_alone:
            return True
        patience = PATIENCE if self._agreed else _SHORT
        self._agreed = False
        if self._key:  # else the process group came later than the monitor
            with suppress(RuntimeError):
                self._agreed = self._all_come(f"{self._place()}/{step}/{point}", patience)
        return self._agreed

    def _all_come(self, key: str, patience: float) -> bool:
        store = _store()
        store.compare_set(key, "", _OPEN)
        is_last = store.add(f"{key}/came", 1) == self.world
        end = time.monotonic() + patience
        with suppress(Exception):  # the answer counts
            while not is_last and _value(key) == _OPEN.encode() and time.monotonic() < end:
                if len(self.present()) < self.world - 1:
                    break
                time.sleep(_PAUSE)
        return bool(store.compare_set(key, _OPEN, "yes" if is_last else "no") == b"yes")


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
