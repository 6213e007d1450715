"""Reports kept in a list."""

from adiv_monitor.report import StepReport


class MemorySink:
    """Keeps every report, for notebooks and tests.

    Attributes:
        reports: all reports so far, oldest first.
    """

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def write(self, report: StepReport) -> None:
        """Append the report."""
        self.reports.append(report)

    def close(self) -> None:
        """Nothing to finish: the reports stay."""
