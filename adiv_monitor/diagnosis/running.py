"""The reports of a running training, for rules and pictures."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any, Generic, TypeVar

from adiv_monitor.diagnosis.diagnose import diagnose
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Facts, Record
from adiv_monitor.diagnosis.seen import activation_before, chance_of, seen_in
from adiv_monitor.report import Alarm, StepReport
from adiv_monitor.report.wording import non_finite_words

_T = TypeVar("_T")
MOST_REPORTS = 100
MOST_LOSSES = 2_000


@dataclass
class Raised:
    """An alarm rule of the user's that held in a layer.

    Attributes:
        alarm: alarm of the last step in which the rule held.
        first: number of the first such step.
        last: number of the last such step.
        times: number of measured steps in which the rule held.
    """

    alarm: Alarm
    first: int
    last: int
    times: int = 0

    def __str__(self) -> str:
        if self.times == 1:
            return f"{self.alarm} (step {self.first:,})"
        return f"{self.alarm} (step {self.last:,}; {self.times:,} times since step {self.first:,})"


class Thinned(Generic[_T]):
    """A bounded history by step: the first two items, every n-th after them, and the last.

    n doubles whenever there are more than `most`.
    """

    def __init__(self, most: int) -> None:
        self.count = 0  # of the items that were added
        self._most, self._stride = most, 1
        self._kept: list[tuple[int, int, _T]] = []  # (its number, its step, item)

    def add(self, step: int, item: _T) -> None:
        """Add the item of one more step."""
        if self._kept and not self.stays(self._kept[-1][0]):
            self._kept.pop()
        self._kept.append((self.count, step, item))
        self.count += 1
        while len(self._kept) > self._most:
            self._stride *= 2
            *before, last = self._kept
            self._kept = [*(kept for kept in before if self.stays(kept[0])), last]

    def stays(self, number: int) -> bool:
        """Return whether the item of this number stays when others follow."""
        return number < 2 or number % self._stride == 0

    def pop(self) -> _T:
        """Remove the last item, as if it had not been added, and return it."""
        self.count -= 1
        return self._kept.pop()[2]

    def go_back_to(self, step: int) -> None:
        """Forget the items from this step on."""
        self._kept = [kept for kept in self._kept if kept[1] < step]
        self.count = self._kept[-1][0] + 1 if self._kept else 0

    @property
    def pairs(self) -> list[tuple[int, _T]]:
        """The kept (step, item), in the order in which they were added."""
        return [(step, item) for _, step, item in self._kept]


class Running:
    """A bounded history of the reports of a training.

    Of many reports, it keeps the first two, by which rules judge the beginning, the last one, and
    some between, as objects that all histories of a run share, so that hundreds of layers take some
    ten MiB.

    If layers are measured in turn, the reports of a round are merged into one of all layers so far.
    """

    def __init__(self) -> None:
        self._reports: Thinned[StepReport] = Thinned(MOST_REPORTS)
        self._losses: Thinned[float] = Thinned(MOST_LOSSES)
        self._raised: dict[tuple[str, str], Raised] = {}  # by rule and layer
        # Step and place of the first value that is not finite; None: all examined are finite.
        self.first_non_finite: tuple[int, str] | None = None
        self._skipped: tuple[int, int] | None = None  # first step, and number, of passing ones
        self._passing = 0  # losses that are not finite since `first_non_finite`

    def add(self, report: StepReport) -> None:
        """Add the report of one more step.

        A step before the last one begins another training, or goes on from an earlier checkpoint:
        what was measured from this step on is forgotten. Several monitors may report the same one.
        """
        if self.count and report.step < self.last.step:
            self._go_back_to(report.step)
        self.add_losses({step: x for step, x in report.losses.items() if step < report.step})
        if self.first_non_finite is None and (first := report.first_non_finite) is not None:
            self.first_non_finite = report.step, non_finite_words(report, *first)
        self.add_losses({step: x for step, x in report.losses.items() if step >= report.step})
        for alarm in report.alarms:
            key = alarm.rule, alarm.layer
            raised = self._raised.setdefault(key, Raised(alarm, report.step, report.step))
            raised.alarm, raised.last, raised.times = alarm, report.step, raised.times + 1
        if self.count:
            if spikes := (*self.last.spikes, *report.spikes)[-8:]:  # of this report and former ones
                report = replace(report, spikes=spikes)
            turn, round_ = report.turn, self.last.turn
            if round_ and turn and (turn.of, turn.first) == (round_.of, round_.last + 1):
                report = _together(self._reports.pop(), report)
        self._reports.add(report.step, report)

    def _go_back_to(self, step: int) -> None:
        self._reports.go_back_to(step)
        self._losses.go_back_to(step)
        # How often the others held before this step is not known.
        self._raised = {key: raised for key, raised in self._raised.items() if raised.last < step}
        if self.first_non_finite is not None and self.first_non_finite[0] >= step:
            self.first_non_finite = None
        if self._skipped is not None and self._skipped[0] >= step:
            self._skipped = None

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of further steps, with or without reports."""
        for step, loss in losses.items():
            self._losses.add(step, loss)
            if self.first_non_finite is None and not isfinite(loss):
                self.first_non_finite, self._passing = (step, "the loss"), 0
            if self.first_non_finite is not None and self.first_non_finite[1] == "the loss":
                if not isfinite(loss):
                    self._passing += 1
                else:  # weights were not reached: the step was skipped
                    first, count = self._skipped or (self.first_non_finite[0], 0)
                    self._skipped, self.first_non_finite = (first, count + self._passing), None

    @property
    def count(self) -> int:
        """The number of reports, or of rounds of them, that were added."""
        return self._reports.count

    @property
    def last(self) -> StepReport:
        """The last report; at least one must have been added."""
        return self.reports[-1]

    @property
    def alarms(self) -> tuple[Raised, ...]:
        """All alarms that were raised so far, those of the last steps first."""
        return tuple(sorted(self._raised.values(), key=lambda raised: -raised.last))

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """The kept reports, oldest first."""
        return tuple(report for _, report in self._reports.pairs)

    def record(self) -> Record:
        """Return the record for the audit's rules; facts outside the reports are unknown in it."""
        reports, losses = self.reports, _course(dict(self._losses.pairs))
        step, place = self.first_non_finite or (None, None)
        return Record(
            Facts("", 0, 0, "", {}, 0, 0, 0, 1, 0, "", "", nan),  # unknown
            losses=tuple(losses.values()),
            loss_steps=tuple(losses),
            gradient_norms=(),
            reports=reports,
            first_non_finite=place,
            non_finite_since=step,
            skipped=self._skipped,
            probed=seen_in(reports),
            chance=chance_of(reports, [*losses.values()]),
            activated_output=activation_before(reports),
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the audit's rules in the reports alone, strongest first.

        Rules about inputs, units, wiring or other learning rates find nothing here. Without losses
        in the reports, a rule that needs a bad course of the loss for "act" returns "watch".
        """
        return diagnose(self.record())


def _course(losses: Mapping[int, float]) -> dict[int, float]:
    """Return step → loss; if the last losses are not finite, it ends with the first of them.

    Other losses that are not finite are left out.
    """
    kept = [*losses.items()]
    after = next((i for i in reversed(range(len(kept))) if isfinite(kept[i][1])), -1) + 1
    return {s: loss for s, loss in kept[:after] if isfinite(loss)} | dict(kept[after:][:1])


def _together(report: StepReport, later: StepReport) -> StepReport:
    """Merge the reports of two turns of a round; each layer keeps the reading of its own step."""
    earlier, turn = report.turn, later.turn
    assert earlier is not None
    assert turn is not None
    elements = earlier.elements + turn.elements
    covered = earlier.elements * report.coverage + turn.elements * later.coverage
    names = ("layers", "unsupported", "unmeasured", "groups", "attention")
    by_layer: dict[str, Any] = {n: {**getattr(report, n), **getattr(later, n)} for n in names}
    return replace(
        later,
        **by_layer,
        coverage=covered / elements if elements else 0.0,
        notes=tuple(dict.fromkeys(report.notes + later.notes)),
        alarms=report.alarms + later.alarms,
        turn=replace(turn, first=earlier.first, elements=elements),
    )
