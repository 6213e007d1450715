"""The package's own exceptions."""

from adiv_monitor.report import StepReport


class AdivError(RuntimeError):
    """The monitor met a state of the training run in which it can't do what was asked."""


class AlarmError(AdivError):
    """Alarms of `Monitor(on_alarm="stop")` hold in a report.

    Args:
        report: that raises them.

    Attributes:
        report: the report, which all sinks have got.
        alarms: its alarms.
    """

    def __init__(self, report: StepReport) -> None:
        said = "; ".join(map(str, report.alarms[:_MOST]))
        more = len(report.alarms) - _MOST
        super().__init__(f"step {report.step}: {said}" + f"; and {more} more" * (more > 0))
        self.report = report
        self.alarms = report.alarms

    def __reduce__(self) -> tuple[type["AlarmError"], tuple[StepReport]]:
        return AlarmError, (self.report,)


_MOST = 3  # alarms that the message names
