"""Reports for all ranks: contributions are gathered at the first rank, which merges them.

Every rank sends its contribution when it is complete, as its next forward pass begins, and goes on.
When the first rank begins its next optimizer step, the gradients of all have been averaged: all
ranks have begun that forward pass and sent their contributions. So no rank has to wait. If a
contribution is still missing (a GPU lags behind its rank), the first rank checks again at each
step, and does without it when `_LATE` more reports are waiting. It waits only when reports are
requested now, or at the end, for at most `PATIENCE` seconds, and not again for the same rank until
a message of that rank arrives. A rank that ends, raises or has no monitor delays the others no
more. The other ranks check for the report in the same way; at the end, when the first rank may need
them elsewhere, for no longer than `_FAREWELL`.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
_STOP = "stop"  # a point of a step in which all ranks participate, or none
_MALFORMED = "The message of rank {} can't be read, so its rows are not in this report."
_UNFIT = (
    "The messages of ranks {} can't be merged with the rest ({}), so their rows are not in "
    "this report."
)


@dataclass(frozen=True)
class _Heard:
    """A report of the first rank, and the ranks that it covers."""

    report: StepReport
    ranks: list[int]


@dataclass
class _Waiting:
    """A report that is not complete.

    Attributes:
        step: number of the step.
        own: this rank's contribution.
        meeting: meeting where the first rank collects; None: this rank reports for itself.
        parts: contributions received so far, by rank.
        expected: the ranks whose contributions are missing.
        heard: the first rank's merged report.
        malformed: the ranks that sent malformed messages.
    """

    step: int
    own: RankContribution
    meeting: str | None
    parts: dict[int, RankContribution] = field(default_factory=dict)
    expected: set[int] = field(default_factory=set)
    heard: _Heard | None = None
    malformed: list[int] = field(default_factory=list)


class Assembly:
    """Assembly of one monitor's reports, with the monitors of the same name in other ranks.

    Args:
        max_rows: number of sampled rows per layer, of all ranks together.
        generator: the monitor's own random generator.
        complete: makes the report of a step from a contribution, of one rank or merged.
        emit: called with every report, and whether this rank is to write it.
        at_once: all ranks are to have each report in the same optimizer step, even if they have to
            wait for it.
    """

    def __init__(
        self,
        max_rows: int | None,
        generator: np.random.Generator,
        complete: Callable[[RankContribution], StepReport],
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
        self._agreed = True  # whether the last attempt to agree succeeded
        self._silent: set[int] = set()  # ranks that did not answer in time
        self._is_apart = False  # whether the first rank's last report did not cover this rank
        self._waiting: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        """Whether a report waits for other ranks."""
        return bool(self._waiting)

    def join(self, name: str) -> None:
        """Join the exchange of the ranks, as the monitor is attached.

        Args:
            name: name of the measured model, the same in all ranks.
        """
        self._name = name
        if world_size() > 1:
            self._meet()

    def _meet(self) -> Exchange:
        self._exchange = Exchange(self._name)
        if self._exchange.rank:  # ranks should not all sample the same rows
            chance = self._generator.bit_generator
            assert isinstance(chance, np.random.PCG64)
            chance.advance(self._exchange.rank << 96)
        return self._exchange

    def decline(self, step: int, *, wholly: bool) -> None:
        """Decline all points of a step; with `wholly`, also decline to send a contribution."""
        exchange = self._exchange
        if exchange is None:
            return
        with suppress(RuntimeError):  # raised if the store is gone
            exchange.decline(step)
            meeting = exchange.meeting()
            if wholly and exchange.rank and meeting is not None:
                exchange.put(meeting, step, b"")

    def agree(self, step: int, point: str, *, participates: bool = True) -> bool:
        """Whether all ranks participate in a point of a step, so that a collective may follow.

        After a point in which some did not, ranks wait only briefly; they never wait for a rank
        that declines.
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
        """Complete the reports whose contributions have arrived, as an optimizer step begins."""
        if self._at_once:
            self.wait()
        else:
            self.collect()

    def all_stop(self, step: int) -> bool:
        """Whether all ranks have the same report of this step, and stop because of it."""
        return self.agree(step, _STOP)

    def wait(self) -> None:
        """Complete all reports now; all ranks call this."""
        if self._waiting:  # the first rank may have to wait for a third one
            self.collect(PATIENCE if self._is_first else 2 * PATIENCE)

    def end(self, patience: float | None = None) -> None:
        """Complete all reports and leave the exchange, as the monitor is closed.

        Args:
            patience: largest time to wait, in seconds; None: the default.
        """
        if patience is None:
            patience = PATIENCE if self._is_first else _FAREWELL
        try:
            self.collect(patience)
        finally:  # otherwise later monitors of this name would be numbered differently
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.leave()

    @property
    def _world(self) -> int:
        """Number of ranks that train together, or did when the step was measured."""
        return world_size() if self._exchange is None else self._exchange.world

    @property
    def _is_first(self) -> bool:
        return self._exchange is None or self._exchange.rank == 0

    def add(self, part: RankContribution) -> None:
        """Add this rank's complete contribution to a step."""
        if self._world == 1:
            self._emit(self._complete(part), True)
            return
        own = prepared(part, self._max_rows, self._world, self._generator)
        waiting = _Waiting(own.report.step, own, None)
        self._waiting.append(waiting)
        with suppress(RuntimeError):  # raised if the store is gone
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
        """Complete the reports whose contributions have arrived, in their order.

        Args:
            patience: complete all reports, with contributions that arrive within these seconds.
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
        """Stop waiting for ranks that have left; their earlier messages are still read."""
        if self._exchange is not None and self._exchange.rank == 0:
            waiting.expected &= set(self._exchange.present())

    def _look(self, waiting: _Waiting) -> bool:
        """Read arrived messages; return whether none is missing."""
        exchange = self._exchange
        if exchange is None or waiting.meeting is None:
            return True
        if exchange.rank:
            return self._hear(exchange, waiting)
        for rank in range(1, exchange.world):  # also ranks that have left since
            data = None if rank in waiting.parts else exchange.take(waiting.step, rank)
            if data is not None:
                if data:  # an empty message declines
                    self._receive(waiting, rank, data)
                waiting.expected.discard(rank)
                self._silent.discard(rank)
        return not waiting.expected

    def _receive(self, waiting: _Waiting, rank: int, data: bytes) -> None:
        """Store another rank's contribution, or record that its message is malformed."""
        try:
            part = decode(RankContribution, data)
            check(part)
        except Malformed:
            waiting.malformed.append(rank)
        else:
            waiting.parts[rank] = part

    def _hear(self, exchange: Exchange, waiting: _Waiting) -> bool:
        """Read the first rank's report; return whether no more messages of it are expected."""
        left = exchange.meeting() != waiting.meeting  # it leaves only after its last report
        data = exchange.get(waiting.meeting or "", waiting.step, 0)
        if data is not None:
            try:
                waiting.heard = decode(_Heard, data)
            except Malformed:
                waiting.malformed.append(0)
        return left or data is not None

    def _finish(self, waiting: _Waiting) -> None:
        """Emit the first rank's report, or make one."""
        rank = 0 if self._exchange is None else self._exchange.rank
        if waiting.heard is not None:
            self._is_apart = rank not in waiting.heard.ranks
            if not self._is_apart:
                self._emit(waiting.heard.report, False)
                return
        notes = [_MALFORMED.format(other) for other in waiting.malformed]
        try:
            report, ranks = self._made({rank: waiting.own, **waiting.parts}, notes)
        except Exception as error:
            if not waiting.parts:
                raise
            others = ", ".join(map(str, sorted(waiting.parts)))
            notes.append(_UNFIT.format(others, f"{type(error).__name__}: {error}"))
            report, ranks = self._made({rank: waiting.own}, notes)
        if self._exchange is not None and waiting.meeting is not None and rank == 0:
            with suppress(RuntimeError):
                heard = encode(_Heard(report, ranks))
                self._exchange.put(waiting.meeting, waiting.step, heard)
        if self._at_once and (rank or len(ranks) < self._world):  # not all ranks have this report
            self.agree(waiting.step, _STOP, participates=False)
        # If the first rank writes the report, this rank was merely too late for it.
        self._emit(report, rank == 0 or waiting.meeting is None or self._is_apart)

    def _made(
        self, parts: dict[int, RankContribution], notes: list[str]
    ) -> tuple[StepReport, list[int]]:
        """Return the report of these ranks, and the ranks that it covers."""
        part, ranks = merge_ranks(parts, self._world, self._max_rows, self._generator)
        part.report = replace(part.report, notes=(*part.report.notes, *notes))
        return self._complete(part), ranks


_PAUSE, _LOOK = 0.002, 0.25  # seconds
