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
from dataclasses import replace

import numpy as np

from adiv_monitor.capture.world import world_size
from adiv_monitor.report import StepReport
from adiv_monitor.step.merge import merge_ranks, prepared
from adiv_monitor.step.messages import decode, decode_report, encode, encode_report
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.ranks import PAUSE, Ranks

PATIENCE, _FAREWELL, _SHORT = 10.0, 2.0, 0.5  # seconds
_STOP = "stop"  # a point of a step in which all ranks participate, or none
_MALFORMED = "The message of rank {} can't be read, so its rows are not in this report."


class Assembly:
    """Assembly of one monitor's reports, with the monitors of the same name in other ranks.

    Args:
        max_rows: number of sampled rows per layer, of all ranks together.
        generator: the monitor's own random generator.
        complete: makes the report of a step from a contribution, of one rank or merged.
        emit: called with every report, and whether this rank is to write it.
    """

    def __init__(
        self,
        max_rows: int | None,
        generator: np.random.Generator,
        complete: Callable[[RankContribution], StepReport],
        emit: Callable[[StepReport, bool], None],
    ) -> None:
        self._max_rows = max_rows
        self._generator = generator
        self._complete = complete
        self._emit = emit
        self._name = ""
        self._ranks: Ranks | None = None
        self._patience: float | None = None
        self._agreed = True  # whether the last attempt to agree succeeded
        self._silent: set[int] = set()  # ranks that did not answer in time
        self._covers_all = True  # whether the last report does, and all ranks have it

    def join(self, name: str) -> None:
        """Join the monitors of the other ranks, as this one is attached.

        Args:
            name: name of the measured model, the same in all ranks.
        """
        self._name = name
        if world_size() == 1:
            return
        self._ranks = Ranks(name)
        if self._ranks.rank:  # ranks should not all sample the same rows
            chance = self._generator.bit_generator
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
        if self._ranks is None:
            self.join(self._name)
        if (ranks := self._ranks) is None:
            self._emit(self._complete(part), True)
            return
        sums = prepared(part.sums, self._max_rows, ranks.world, self._generator)
        own = replace(part, sums=sums)
        made = self._merged(own, ranks) if ranks.rank == 0 else self._heard(own, ranks)
        report, covered, writes = made
        self._covers_all = len(covered) == ranks.world
        self._emit(report, writes)

    def _merged(self, own: RankContribution, ranks: Ranks) -> tuple[StepReport, list[int], bool]:
        """Return the report of all ranks, or of this one; the ranks that it covers; and True."""
        parts, notes = dict[int, RankContribution](), list[str]()
        with suppress(RuntimeError):  # raised if the store is gone
            for rank, message in self._messages(ranks, own.report.step, range(1, ranks.world)):
                try:
                    parts[rank] = decode(message)
                except Exception:
                    notes.append(_MALFORMED.format(rank))
        report, covered = self._made({0: own, **parts}, notes, ranks.world)
        with suppress(RuntimeError):
            ranks.put(report.step, encode_report(report, covered))
        return report, covered, True

    def _heard(self, own: RankContribution, ranks: Ranks) -> tuple[StepReport, list[int], bool]:
        """Return the first rank's report or this one's, its ranks, and whether to write it."""
        writes, notes = False, list[str]()
        try:
            ranks.put(own.report.step, encode(own))
            for _, message in self._messages(ranks, own.report.step, [0]):
                try:
                    report, covered = decode_report(message)
                except Exception:
                    notes.append(_MALFORMED.format(0))
                    continue
                if ranks.rank in covered:
                    return report, covered, False
                writes = True  # the first rank trains something else, else it is merely late
        except RuntimeError:  # the store is gone, or the first rank has no monitor
            writes = True
        return *self._made({ranks.rank: own}, notes, ranks.world), writes

    def _messages(
        self, ranks: Ranks, step: int, expected: Collection[int]
    ) -> list[tuple[int, bytes]]:
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
                return sorted(found.items())
            time.sleep(PAUSE)

    def _made(
        self, parts: dict[int, RankContribution], notes: list[str], world: int
    ) -> tuple[StepReport, list[int]]:
        """Return the report of these ranks, and the ranks that it covers."""
        part, covered = merge_ranks(parts, world, self._max_rows)
        part.report = replace(part.report, notes=(*part.report.notes, *notes))
        return self._complete(part), covered
