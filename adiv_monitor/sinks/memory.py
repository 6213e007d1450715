"""A sink that keeps reports in a list."""

from typing import TYPE_CHECKING

from adiv_monitor.files import needs
from adiv_monitor.report import StepReport

if TYPE_CHECKING:
    from pandas import DataFrame


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
        """Do nothing: the reports stay."""

    def to_pandas(self) -> "DataFrame":
        """Return a data frame with a row per step and layer.

        Its columns are those of `StepReport.to_rows`: `step`, `layer`, `loss`, `learning_rate`,
        every measure, and its standard error. What is not known is NaN; the standard error of an
        exact value is 0.

        Raises:
            ImportError: pandas is not installed.
        """
        needs("MemorySink.to_pandas", ["pandas"], "pandas")
        from pandas import DataFrame

        frame = DataFrame([row for report in self.reports for row in report.to_rows()])
        # Rows of a step without sampled layers have no column for the error.
        errors = [column for column in frame if str(column).endswith("_standard_error")]
        taken = {column: frame[str(column).removesuffix("_standard_error")] for column in errors}
        for column, values in taken.items():
            frame[column] = frame[column].fillna(0.0).where(values.notna())
        return frame
