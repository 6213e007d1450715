"""Exceptions of the package."""

from adiv_monitor.report import StepReport


class AdivError(RuntimeError):
    """Error for a state of the training run in which the monitor can't do what was requested."""


class AlarmError(AdivError):
    """Error raised when alarms of `Monitor(on_alarm="stop")` hold in a report.

    Args:
        report: the report that raises the alarms.

    Attributes:
        report: the report, which all sinks have received.
        alarms: alarms of the report.
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
