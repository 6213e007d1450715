"""A running training as its reports tell of it: what rules find, and what pictures show."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan

from adiv_monitor.diagnosis.diagnose import diagnose
from adiv_monitor.diagnosis.finding import Finding
from adiv_monitor.diagnosis.record import Facts, Record
from adiv_monitor.report import Alarm, StepReport
from adiv_monitor.report.wording import non_finite_words

MOST_REPORTS = 100
MOST_LOSSES = 2_000


@dataclass
class Raised:
    """A rule of the user's that held in a layer.

    Attributes:
        alarm: of the last step in which it did.
        first: number of the first such step.
        last: of the last one.
        times: in how many measured steps it did.
    """

    alarm: Alarm
    first: int
    last: int
    times: int = 0

    def __str__(self) -> str:
        if self.times == 1:
            return f"{self.alarm} (step {self.first:,})"
        return f"{self.alarm} (step {self.last:,}; {self.times:,} times since step {self.first:,})"


class Running:
    """The reports of a training so far, as many as a picture has room for.

    Kept are the first two, by which rules judge the beginning, the last, and of those between every
    so many-th: twice as many steps lie between them whenever there are more than `MOST_REPORTS`.
    Of all but the last those without the distributions over rows are kept, which all histories of
    a run share, so that hundreds of layers stay within some ten MiB.

    Where layers are measured in turn, the reports of a round are one, of all layers so far.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, StepReport]] = []  # with the number of the report
        self._count = 0
        self._stride = 1
        self._raised: dict[tuple[str, str], Raised] = {}  # by rule and layer
        self._losses = Losses()
        self._broken: tuple[int, str] | None = None  # step, and what was not finite first

    def add(self, report: StepReport) -> None:
        """Take the report of one more step."""
        self.add_losses({step: x for step, x in report.losses.items() if step < report.step})
        if self._broken is None and (first := report.first_non_finite) is not None:
            self._broken = report.step, non_finite_words(report, *first)
        self.add_losses({step: x for step, x in report.losses.items() if step >= report.step})
        newest = report
        if self._kept:
            number, before = self._kept.pop()
            if _goes_on(before, report):
                newest, self._count = _together(before, report), number
            elif self._stays(number):
                self._kept.append((number, before.lean))
        self._kept.append((self._count, newest))
        self._count += 1
        for alarm in report.alarms:
            key = alarm.rule, alarm.layer
            raised = self._raised.setdefault(key, Raised(alarm, report.step, report.step))
            raised.alarm, raised.last, raised.times = alarm, report.step, raised.times + 1
        while len(self._kept) > MOST_REPORTS:
            self._stride *= 2
            last = self._kept[-1]
            self._kept = [pair for pair in self._kept[:-1] if self._stays(pair[0])] + [last]

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Take the losses of some more steps, whether there is a report of them or not."""
        self._losses.add(losses)
        if self._broken is None:
            broken = next((step for step, loss in losses.items() if not isfinite(loss)), None)
            self._broken = None if broken is None else (broken, "the loss")

    def _stays(self, number: int) -> bool:
        return number < 2 or number % self._stride == 0

    @property
    def count(self) -> int:
        """Reports that came, or rounds of them."""
        return self._count

    @property
    def last(self) -> StepReport:
        """The last one, with its distributions; there must be one."""
        return self._kept[-1][1]

    @property
    def alarms(self) -> tuple[Raised, ...]:
        """All that were raised so far, those of the last steps first."""
        return tuple(sorted(self._raised.values(), key=lambda raised: -raised.last))

    @property
    def first_non_finite(self) -> tuple[int, str] | None:
        """Step, and what was not finite first; None: everything that was looked at is finite."""
        return self._broken

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """Those that are kept, oldest first; the last of them whole."""
        return tuple(report for _, report in self._kept)

    def record(self) -> Record:
        """What the audit's rules judge. All that reports don't tell of is unknown in it."""
        unknown = Facts("", 0, 0, "", {}, 0, 0, 0, 1, 0, "", "", nan)
        reports = self.reports
        changes = {r.step: r.realised_loss_change for r in reports}
        losses = self._losses.course()
        step, place = self._broken or (None, None)
        return Record(
            unknown,
            losses=tuple(losses.values()),
            loss_steps=tuple(losses),
            gradient_norms=(),
            reports=reports,
            realised={step: change for step, change in changes.items() if change is not None},
            first_non_finite=place,
            non_finite_since=step,
        )

    def findings(self) -> tuple[Finding, ...]:
        """What the audit's rules find in the reports alone; strongest first.

        Rules that look at inputs, units, wiring or other learning rates find nothing here. Without
        losses in the reports, a rule that says "act" only where the loss goes badly says "watch".
        """
        return diagnose(self.record())


class Losses:
    """The losses of a training so far, by step: first, last, and of the others every so many-th.

    Twice as many steps lie between them whenever there are more than `MOST_LOSSES`.
    """

    def __init__(self) -> None:
        self._kept: dict[int, float] = {}
        self._last: dict[int, float] = {}  # that one alone
        self._count = 0
        self._stride = 1

    def add(self, losses: Mapping[int, float]) -> None:
        """Take those of some more steps."""
        self._last = dict([*losses.items()][-1:]) or self._last
        for step, loss in losses.items():
            if self._count % self._stride == 0:
                self._kept[step] = loss
            self._count += 1
            if len(self._kept) > MOST_LOSSES:
                self._stride *= 2
                self._kept = dict(list(self._kept.items())[::2])

    def course(self) -> dict[int, float]:
        """Step → loss; if the last are not finite, it ends with the first of them.

        Others that are not finite are left out.
        """
        kept = list((self._kept | self._last).items())
        after = next((i for i in reversed(range(len(kept))) if isfinite(kept[i][1])), -1) + 1
        finite = {step: loss for step, loss in kept[:after] if isfinite(loss)}
        return finite | dict(kept[after : after + 1])


def _goes_on(report: StepReport, later: StepReport) -> bool:
    """Whether a later report is of the same round."""
    earlier, turn = report.turn, later.turn
    if earlier is None or turn is None:
        return False
    return turn.of == earlier.of and turn.first == earlier.last + 1


def _together(report: StepReport, later: StepReport) -> StepReport:
    """One report of two turns of a round: each layer at its own step."""
    earlier, turn = report.turn, later.turn
    assert earlier is not None
    assert turn is not None
    elements = earlier.elements + turn.elements
    covered = earlier.elements * report.coverage + turn.elements * later.coverage
    return replace(
        later,
        layers={**report.layers, **later.layers},
        unsupported={**report.unsupported, **later.unsupported},
        coverage=covered / elements if elements else 0.0,
        notes=tuple(dict.fromkeys(report.notes + later.notes)),
        unmeasured={**report.unmeasured, **later.unmeasured},
        attention={**report.attention, **later.attention},
        alarms=report.alarms + later.alarms,
        turn=replace(turn, first=earlier.first, elements=elements),
    )
