"""Reports for all ranks: contributions are gathered at the first rank, which merges them.

Every rank reads its measured step as its next optimizer step begins: the gradients of all have been
averaged by then, so all are there. Each puts its contribution into the store; the first rank merges
them and puts the report there. It waits for at most `PATIENCE` seconds, and for a rank that was not
heard in that time only briefly. A rank that ends, or has no monitor, delays the others no more. As
monitors are closed, when the first rank may need the others elsewhere, these wait for its report
for no longer than `_FAREWELL`.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from adiv_monitor.capture.weights.shards import world_size
from adiv_monitor.report import StepReport
from adiv_monitor.step.gradient_check import settled
from adiv_monitor.step.merge import merge_ranks, prepared
from adiv_monitor.step.messages import decode, decode_report, encode, encode_report
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.ranks import PAUSE, Ranks

PATIENCE, _FAREWELL, _SHORT = 10.0, 2.0, 0.5  # seconds
_STOP = "stop"  # a point of a step in which all ranks participate, or none


@dataclass(eq=False)
class Assembly:
    """Assembly of one monitor's reports, with the monitors of the same name in other ranks.

    Attributes:
        max_rows: number of sampled rows per layer, of all ranks together.
        generator: the monitor's own random generator.
        complete: makes the report of a step from a contribution, of one rank or merged, in the
            units of the optimizer's gradient.
        emit: called with every report, and whether this rank is to write it.
    """

    max_rows: int | None
    generator: np.random.Generator
    complete: Callable[[RankContribution], StepReport]
    emit: Callable[[StepReport, bool], None]
    _ranks: Ranks | None = None
    _patience: float | None = None
    _agreed: bool = True  # whether the last attempt to agree succeeded
    _silent: set[int] = field(default_factory=set)  # ranks that did not answer in time
    _covers_all: bool = True  # whether the last report does, and all ranks have it

    def join(self, name: str) -> None:
        """Join the monitors of the other ranks, as this one is attached.

        Args:
            name: name of the measured model, the same in all ranks.
        """
        if world_size() == 1:
            return
        self._ranks = Ranks(name)
        if self._ranks.rank:  # ranks should not all sample the same rows
            chance = self.generator.bit_generator
            assert isinstance(chance, np.random.PCG64)
            chance.advance(self._ranks.rank << 96)

    def ends(self, patience: float | None) -> None:
        """Prepare for the last report; wait for it for at most these seconds, if they are given."""
        is_first = self._ranks is None or self._ranks.rank == 0
        self._patience = patience if patience is not None or is_first else _FAREWELL

    def leave(self) -> None:
        """Leave the other ranks, as the monitor is closed."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.leave()

    @property
    def is_alone(self) -> bool:
        """Whether no other rank trains, or trained when the monitor was attached."""
        return self._ranks is None and world_size() == 1

    def agree(self, step: int, point: str) -> bool:
        """Whether all ranks participate in a point of a step, so that a collective may follow.

        After a point in which some did not, ranks wait only briefly.
        """
        if self.is_alone:
            return True
        patience = PATIENCE if self._agreed else _SHORT
        self._agreed = False
        with suppress(RuntimeError):  # raised if the store is gone
            self._agreed = self._ranks is not None and self._ranks.agree(step, point, patience)
        return self._agreed

    def all_stop(self, step: int) -> bool:
        """Whether all ranks have the same report of this step, and stop because of it."""
        return self._covers_all and self.agree(step, _STOP)

    def add(self, part: RankContribution) -> None:
        """Make and emit the report to which this rank contributes."""
        if (ranks := self._ranks) is None:
            self.emit(self.complete(replace(part, sums=settled(part.sums))), True)
            return
        step, is_gone = part.report.step, False
        sums = prepared(part.sums, self.max_rows, ranks.world, self.generator)
        parts, heard = {ranks.rank: replace(part, sums=sums)}, None
        try:
            if ranks.rank:
                ranks.put(step, encode(parts[ranks.rank]))
                for message in self._messages(ranks, step, [0]).values():
                    heard = decode_report(message)
            else:
                found = self._messages(ranks, step, range(1, ranks.world))
                parts |= {rank: decode(found[rank]) for rank in sorted(found)}
        except RuntimeError:  # the store is gone, or the first rank has no monitor
            is_gone = True
        if heard is not None and ranks.rank in heard[1]:
            (report, covered), writes = heard, False
        else:  # the first rank trains something else, or is late
            whole, covered = merge_ranks(parts, ranks.world, self.max_rows)
            report, writes = self.complete(whole), not ranks.rank or is_gone or heard is not None
            if not ranks.rank:
                with suppress(RuntimeError):
                    ranks.put(step, encode_report(report, covered))
        self._covers_all = len(covered) == ranks.world
        self.emit(report, writes)

    def _messages(self, ranks: Ranks, step: int, expected: Collection[int]) -> dict[int, bytes]:
        """Return the messages of ranks for a step, once all are there or time is up."""
        patience = PATIENCE if self._patience is None else self._patience
        begin, found, missing = time.monotonic(), dict[int, bytes](), {*expected}
        while True:
            present = ranks.present()  # looked at first: who leaves has written before
            for rank in sorted(missing):
                if (message := ranks.get(step, rank)) is not None:
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
            time.sleep(PAUSE)
