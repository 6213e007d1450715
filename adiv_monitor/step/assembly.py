"""Reports that speak for all ranks: parts are gathered at the first one, which makes them one.

Every rank hands in its part when its own is complete, as its next forward pass begins, and goes
on. When the first one comes to its next optimizer step, the gradients of all have been averaged:
all have begun that forward pass, and handed in their parts. So nobody has to wait. Where a part has
not come yet all the same (a GPU lags behind its rank), the first rank looks again at each
step, and goes without when `_LATE` more reports are waiting. Only when reports are asked for now,
or at the end, does it wait, for `PATIENCE` seconds at most, and never again for the same rank
until that is heard of. A rank that ends, raises or has no monitor delays the others no more.
The others look for the report in the same way; at the end, when the first rank may need them
elsewhere, for no longer than `_FAREWELL`.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from adiv_monitor.capture.world import world_size
from adiv_monitor.report import StepReport
from adiv_monitor.step.merge_ranks import merge_ranks, prepared
from adiv_monitor.step.messages import Malformed, decode, encode
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.ranks import Exchange
from adiv_monitor.step.soundness import check

PATIENCE, _FAREWELL, _SHORT = 10.0, 2.0, 0.5  # seconds
_LATE = 4  # reports
_STOP = "stop"  # a point of a step that all come to, or none
_MALFORMED = "What rank {} sent can't be read, so it is not in this report."
_UNFIT = "What ranks {} sent can't be put together with the rest ({}), so it is not in this report."


@dataclass(frozen=True)
class _Heard:
    """A report of the first rank, and of which ranks it is."""

    report: StepReport
    ranks: list[int]


@dataclass
class _Waiting:
    """A report that is not complete.

    Attributes:
        step: its number.
        own: this rank's part.
        meeting: where the first rank collects; None: this one speaks for itself.
        parts: by rank, those that have come.
        expected: the ranks whose part has not.
        heard: what the first rank made of them.
        malformed: the ranks of whom came what is no message.
    """

    step: int
    own: RankContribution
    meeting: str | None
    parts: dict[int, RankContribution] = field(default_factory=dict)
    expected: set[int] = field(default_factory=set)
    heard: _Heard | None = None
    malformed: list[int] = field(default_factory=list)


class Assembly:
    """Completes the reports of one monitor, with those of the same name in other ranks.

    Args:
        max_rows: rows to look at per layer, of all ranks together.
        generator: the monitor's own source of chance.
        complete: makes the report of a step from a part of it, be it of one rank or of all.
        emit: gets every report, and whether this rank is to write it.
        at_once: all ranks are to have each report in the same optimizer step, be it that they
            wait for it there.
    """

    def __init__(
        self,
        max_rows: int | None,
        generator: np.random.Generator,
        complete: Callable[[int, RankContribution], StepReport],
        emit: Callable[[StepReport, bool], None],
        *,
        at_once: bool = False,
    ) -> None:
        self._max_rows = max_rows
        self._generator = generator
        self._complete = complete
        self._emit = emit
        self._at_once = at_once
        self._name = ""
        self._exchange: Exchange | None = None
        self._agreed = True  # as far as is known
        self._silent: set[int] = set()  # ranks that were waited for in vain
        self._waiting: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        """Whether a report waits for other ranks."""
        return bool(self._waiting)

    def join(self, name: str) -> None:
        """The monitor is attached; others may count on it.

        Args:
            name: of what is measured, the same in all ranks.
        """
        self._name = name
        if world_size() > 1:
            self._meet()

    def _meet(self) -> Exchange:
        self._exchange = Exchange(self._name)
        if self._exchange.rank:  # the same rows of each would be a poorer choice
            chance = self._generator.bit_generator
            assert isinstance(chance, np.random.PCG64)
            chance.advance(self._exchange.rank << 96)
        return self._exchange

    def decline(self, step: int, *, wholly: bool) -> None:
        """This rank comes to no point of a step; `wholly`: nor hands in a part of it."""
        exchange = self._exchange
        if exchange is None:
            return
        with suppress(RuntimeError):  # the store is gone
            exchange.decline(step)
            meeting = exchange.meeting()
            if wholly and exchange.rank and meeting is not None:
                exchange.put(meeting, step, b"")

    def agree(self, step: int, point: str, *, participates: bool = True) -> bool:
        """Whether all ranks come to a point of a step, so that what takes all may follow.

        Where some did not, the next time nobody waits for long; nor for one that says so.
        """
        if self._world == 1:
            return True
        if self._exchange is None:
            return False
        try:
            if not participates:
                self._exchange.refuse(step, point)
                return False
            self._agreed = self._exchange.agree(step, point, PATIENCE if self._agreed else _SHORT)
        except RuntimeError:  # the store is gone
            self._agreed = False
        return self._agreed

    def proceed(self) -> None:
        """An optimizer step begins: complete the reports whose parts are there."""
        if self._at_once:
            self.wait()
        else:
            self.collect()

    def all_stop(self, step: int) -> bool:
        """Whether all ranks have the same report of this step, and come here by it."""
        return self.agree(step, _STOP)

    def wait(self) -> None:
        """Complete all reports now; all ranks do."""
        if self._waiting:  # the first may have to wait for a third one
            self.collect(PATIENCE if self._is_first else 2 * PATIENCE)

    def end(self, patience: float | None = None) -> None:
        """The monitor is closed.

        Args:
            patience: for how many seconds to wait at most; None: as is usual.
        """
        if patience is None:
            patience = PATIENCE if self._is_first else _FAREWELL
        try:
            self.collect(patience)
        finally:  # monitors of this name that come later must not be counted apart
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.leave()

    @property
    def _world(self) -> int:
        """How many ranks train together, or did when the step was measured."""
        return world_size() if self._exchange is None else self._exchange.world

    @property
    def _is_first(self) -> bool:
        return self._exchange is None or self._exchange.rank == 0

    def add(self, step: int, part: RankContribution) -> None:
        """This rank's part of a step is complete."""
        if self._world == 1:
            self._emit(self._complete(step, part), True)
            return
        own = prepared(part, step, self._max_rows, self._world, self._generator)
        waiting = _Waiting(step, own, None)
        self._waiting.append(waiting)
        with suppress(RuntimeError):  # the store is gone
            self._hand_in(self._exchange or self._meet(), waiting)
        if not self._at_once:
            self.collect()

    def _hand_in(self, exchange: Exchange, waiting: _Waiting) -> None:
        waiting.meeting = exchange.meeting()
        if exchange.rank == 0:
            waiting.expected = set(exchange.present()) - self._silent
        elif waiting.meeting is not None:
            exchange.put(waiting.meeting, waiting.step, encode(waiting.own))

    def collect(self, patience: float | None = None) -> None:
        """Complete the reports whose parts are there, in their order.

        Args:
            patience: complete all of them, with what comes within so many seconds.
        """
        urgent, patience = patience is not None, patience or 0.0
        begin = time.monotonic()
        end, look = begin + patience, begin + _LOOK
        while self._waiting:
            waiting = self._waiting[0]
            try:
                if time.monotonic() > look:
                    look = time.monotonic() + _LOOK
                    self._let_go(waiting)
                is_complete = self._look(waiting)
            except RuntimeError:  # the store is gone
                is_complete = True
            if not is_complete:
                if time.monotonic() < end:
                    time.sleep(_PAUSE)
                    continue
                if not urgent and len(self._waiting) <= _LATE:
                    return
                self._silent |= waiting.expected
            self._waiting.popleft()
            self._finish(waiting)

    def _let_go(self, waiting: _Waiting) -> None:
        """Don't wait for those who have left; what they handed in before is looked at next."""
        if self._exchange is not None and self._exchange.rank == 0:
            waiting.expected &= set(self._exchange.present())

    def _look(self, waiting: _Waiting) -> bool:
        """See what has come; whether that is all."""
        exchange = self._exchange
        if exchange is None or waiting.meeting is None:
            return True
        if exchange.rank:
            return self._hear(exchange, waiting)
        for rank in range(1, exchange.world):  # those that have left since, too
            data = None if rank in waiting.parts else exchange.take(waiting.step, rank)
            if data is not None:
                if data:  # else it declined
                    self._receive(waiting, rank, data)
                waiting.expected.discard(rank)
                self._silent.discard(rank)
        return not waiting.expected

    def _receive(self, waiting: _Waiting, rank: int, data: bytes) -> None:
        """Take another rank's part; of one that is none, nothing."""
        try:
            part = decode(RankContribution, data)
            check(part)
        except Malformed:
            waiting.malformed.append(rank)
        else:
            waiting.parts[rank] = part

    def _hear(self, exchange: Exchange, waiting: _Waiting) -> bool:
        """Whether the first rank has said all that it will."""
        left = exchange.meeting() != waiting.meeting  # after its last report, if at all
        data = exchange.get(waiting.meeting or "", waiting.step, 0)
        if data is not None:
            try:
                waiting.heard = decode(_Heard, data)
            except Malformed:
                waiting.malformed.append(0)
        return left or data is not None

    def _finish(self, waiting: _Waiting) -> None:
        """Make the report, or take the one that the first rank made."""
        rank = 0 if self._exchange is None else self._exchange.rank
        if waiting.heard is not None and rank in waiting.heard.ranks:
            self._emit(waiting.heard.report, False)
            return
        notes = [_MALFORMED.format(other) for other in waiting.malformed]
        try:
            report, ranks = self._made(waiting.step, {rank: waiting.own, **waiting.parts}, notes)
        except Exception as error:
            if not waiting.parts:
                raise
            others = ", ".join(map(str, sorted(waiting.parts)))
            notes.append(_UNFIT.format(others, f"{type(error).__name__}: {error}"))
            report, ranks = self._made(waiting.step, {rank: waiting.own}, notes)
        if self._exchange is not None and waiting.meeting is not None and rank == 0:
            with suppress(RuntimeError):
                heard = encode(_Heard(report, ranks))
                self._exchange.put(waiting.meeting, waiting.step, heard)
        if self._at_once and (rank or len(ranks) < self._world):  # not what all have
            self.agree(waiting.step, _STOP, participates=False)
        # Where another rank is there to write, this one was merely not heard in time.
        self._emit(report, rank == 0 or waiting.meeting is None or waiting.heard is not None)

    def _made(
        self, step: int, parts: dict[int, RankContribution], notes: list[str]
    ) -> tuple[StepReport, list[int]]:
        """The report of these ranks, and of which of them it is."""
        part, ranks = merge_ranks(parts, self._world, self._max_rows, self._generator)
        part.notes += notes
        return self._complete(step, part), ranks


_PAUSE, _LOOK = 0.002, 0.25  # seconds
