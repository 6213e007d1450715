"""What becomes of complete reports: alarms, the history of the run, sinks, a line at its end."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from adiv_monitor.alarms import Alarms, Rules
from adiv_monitor.diagnosis.running import Running
from adiv_monitor.report import Alarm, StepReport
from adiv_monitor.sinks.conclusion import conclude
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.step.failures import Failures


class Outlet:
    """Takes each complete report of a monitor.

    Args:
        sinks: where reports go.
        alarms: rules over them.
        keep: how many `reports` holds.
        failures: of sinks, and of rules that are functions.

    Attributes:
        reports: the last ones.
        running: what the run has come to; empty where another rank writes.
    """

    def __init__(self, sinks: Sequence[Sink], alarms: Rules, keep: int, failures: Failures) -> None:
        self.reports: deque[StepReport] = deque(maxlen=keep)
        self.running = Running()
        self._sinks = tuple(sinks)
        self._alarms = Alarms(alarms)
        self._failures = failures

    def take(
        self, report: StepReport, writes: bool, stops: Callable[[StepReport], bool]
    ) -> StepReport | None:
        """Look for alarms, and hand the report on.

        Args:
            report: the report.
            writes: whether this rank gives it to the sinks, and says what there is to say.
            stops: whether alarms end the training; asked where there are any.

        Returns:
            The report, if its alarms end the training.
        """
        failures: list[str] = []

        def fail(rule: str, error: Exception) -> None:
            name = f"The alarm {rule}"
            failures.append(self._failures.of_users(name, error, name))

        alarms = self._failures.safely(self._alarms.of, report, fail) or ()
        report = replace(report, alarms=alarms, notes=(*report.notes, *failures))
        is_last = bool(alarms) and stops(report)
        if writes:
            self._failures.safely(self.running.add, report)
            self._warn(report, () if is_last else alarms)
            if failures := [*self._write(report)]:
                report = replace(report, notes=(*report.notes, *failures))
        self.reports.append(report)
        return report if is_last else None

    def add_last_losses(self, losses: Mapping[int, float]) -> None:
        """Take the losses of the steps after the last report."""
        if not losses or not self.running.count:  # another rank writes, or nobody does
            return
        self.running.add_losses(losses)
        self._warn_of_non_finite()
        for sink in self._sinks:
            if callable(add := getattr(sink, "add_losses", None)):
                self._failures.guard_sink(sink, partial(add, losses))

    def closings(self, *, quietly: bool) -> Iterator[Callable[[], object]]:
        """What is to be done at the end: close the sinks; say in one line what was found."""
        for sink in self._sinks:
            yield partial(self._failures.guard_sink, sink, sink.close)
        if not quietly:
            yield partial(self._failures.safely, conclude, self.running, self._sinks)

    def _write(self, report: StepReport) -> Iterator[str]:
        """Give it to the sinks; of those that fail, what went wrong."""
        for sink in self._sinks:
            failure = self._failures.guard_sink(sink, partial(sink.write, report))
            if failure is not None:
                yield failure

    def _warn(self, report: StepReport, alarms: Sequence[Alarm]) -> None:
        """Each alarm in each layer once; and each rule that has nothing to look at."""
        for rule in self._alarms.idle if report.ends_round and report.layers else ():
            self._failures.warn(
                f"idle {rule}",
                f"adiv_monitor: the alarm {rule!r} has found nothing to compare up to step "
                f"{report.step}: no layer with a reading has that name, or none that measure",
            )
        self._warn_of_non_finite()
        for alarm in alarms:
            self._failures.warn(
                f"{alarm.rule} {alarm.layer}", f"adiv_monitor: step {report.step}: {alarm}"
            )

    def _warn_of_non_finite(self) -> None:
        """Once, and not only at the end."""
        step, where = self.running.first_non_finite or (None, None)
        if step is not None:
            self._failures.warn(
                "not finite",
                f"adiv_monitor: step {step}: not finite (NaN, infinite or too large to square): "
                f"{where}",
            )
