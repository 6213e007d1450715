"""Exceptions of the package."""

from adiv_monitor.report import StepReport


class AdivError(RuntimeError):
    """The state of the monitor or of the training run does not allow what was requested."""


class AlarmError(AdivError):
    """Ends a training in which alarms of `Monitor(on_alarm="stop")` hold.

    Args:
        report: the report with the alarms.

    Attributes:
        report: the report, which all sinks have received.
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


_MOST = 3  # number of alarms that the message names
