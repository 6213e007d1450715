"""Handling of complete reports: alarms, the run history, sinks, and a closing line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from adiv_monitor.alarms import Alarms, Rules
from adiv_monitor.report import Alarm, StepReport
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.step.failures import Failures


class Outlet:
    """Receives each complete report of a monitor.

    Args:
        sinks: sinks that receive the reports.
        alarms: alarm rules over the reports.
        keep: number of reports that `reports` holds.
        failures: handler of failures of sinks, and of rules that are functions.

    Attributes:
        reports: the last reports.
        running: summary of the run so far; empty where another rank writes.
    """

    def __init__(self, sinks: Sequence[Sink], alarms: Rules, keep: int, failures: Failures) -> None:
        # A program that only imports the monitor loads no rules.
        from adiv_monitor.diagnosis.running import Running

        self.reports: list[StepReport] = []
        self._keep = keep
        self.running = Running()
        self._sinks = tuple(sinks)
        self._alarms = Alarms(alarms)
        self._failures = failures

    def take(
        self, report: StepReport, writes: bool, stops: Callable[[StepReport], bool]
    ) -> StepReport | None:
        """Check the report for alarms, and pass it on.

        Args:
            report: the report.
            writes: whether this rank passes the report to the sinks and logs warnings.
            stops: returns whether alarms end the training; called if there are any.

        Returns:
            The report if its alarms end the training, else None.
        """
        failures: list[str] = []

        def fail(rule: str, error: Exception) -> None:
            failures.append(self._failures.handle(error, f"The alarm {rule} failed"))

        alarms = self._failures.safely(self._alarms.of, report, fail) or ()
        report = replace(report, alarms=alarms, notes=(*report.notes, *failures))
        is_last = bool(alarms) and stops(report)
        if writes:
            self._failures.safely(self.running.add, report)
            self._warn(report, () if is_last else alarms)
            of_sinks = (self._failures.guard_sink(s, s.write, report) for s in self._sinks)
            if failures := [said for said in of_sinks if said]:
                report = replace(report, notes=(*report.notes, *failures))
        self.reports.append(report)
        del self.reports[: -self._keep]
        return report if is_last else None

    def add_last_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        if not losses or not self.running.count:  # another rank writes, or none does
            return
        self.running.add_losses(losses)
        self._warn_of_non_finite()
        for sink in self._sinks:
            if callable(add := getattr(sink, "add_losses", None)):
                self._failures.guard_sink(sink, add, losses)

    def closings(self, whose: str, *, quietly: bool) -> Iterator[Callable[[], object]]:
        """Yield the actions at the end of the run: close the sinks, then log a closing line.

        Args:
            whose: name of the monitor among several; "" if there is one.
            quietly: leave out the line.
        """
        for sink in self._sinks:
            yield partial(self._failures.guard_sink, sink, sink.close)
        if not quietly:
            from adiv_monitor.sinks.conclusion import conclude

            yield partial(self._failures.safely, conclude, self.running, self._sinks, whose)

    def _warn(self, report: StepReport, alarms: Sequence[Alarm]) -> None:
        """Warn once of each alarm in each layer, and of each rule that has nothing to compare."""
        for rule in self._alarms.idle if report.ends_round and report.layers else ():
            self._failures.warn(
                f"idle {rule}",
                f"adiv_monitor: the alarm {rule!r} has found nothing to compare up to step "
                f"{report.step}: no measured layer has that name, or none has that measure",
            )
        self._warn_of_non_finite()
        for alarm in alarms:
            self._failures.warn(
                f"{alarm.rule} {alarm.layer}", f"adiv_monitor: step {report.step}: {alarm}"
            )

    def _warn_of_non_finite(self) -> None:
        """Warn once of the first value that is not finite, as soon as it is reported."""
        step, where = self.running.first_non_finite or (None, None)
        if step is not None:
            self._failures.warn(
                "not finite",
                f"adiv_monitor: step {step}: not finite (NaN, infinite or too large to square): "
                f"{where}",
            )
