"""Phases of the learning rate: steps are judged near its peak."""

from collections.abc import Sequence
from dataclasses import replace

from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report import StepReport

PEAK = 0.5  # of the largest learning rate so far: lower ones are warmup or intended decay
_FEWEST = 2  # fewest measured steps at the peak
_RISES = 1.01  # times the learning rate of the previous measured step
LOOK_AGAIN = "look again when the learning rate has reached its peak"
RISES_YET = " The learning rate still rises: measurements at its peak will be clearer."


def learning_rate(report: StepReport) -> float | None:
    """Return the largest learning rate of the optimizer's groups at this step; None: unknown."""
    return max(report.learning_rates, default=None)


def at_peak(record: Record) -> Record:
    """Return the record with only the measured steps whose learning rate is at least half the peak.

    All steps are kept if learning rates are unknown or zero, or if too few steps are at the peak to
    show what is typical.
    """
    rates = [learning_rate(report) for report in record.reports]
    largest = max((rate for rate in rates if rate is not None), default=0.0)
    if not largest > 0:
        return record
    pairs = zip(record.reports, rates, strict=True)
    kept = tuple(r for r, rate in pairs if rate is None or rate >= PEAK * largest)
    return replace(record, reports=kept) if len(kept) >= _FEWEST else record


def still_rises(reports: Sequence[StepReport]) -> bool:
    """Return whether the learning rate was still rising at the last measured step."""
    rates = [rate for report in reports if (rate := learning_rate(report)) is not None]
    return len(rates) >= 2 and rates[-1] == max(rates) and rates[-1] > _RISES * rates[-2]


def decayed_since(reports: Sequence[StepReport]) -> int | None:
    """Return the measured step since which the learning rate is below half its peak, or None."""
    rates = [learning_rate(report) or 0.0 for report in reports]
    largest = max(rates, default=0.0)
    low = [rate < PEAK * largest for rate in rates]
    if not low or not low[-1]:
        return None
    first = len(low) - next((i for i, is_low in enumerate(reversed(low)) if not is_low), len(low))
    return reports[first].step
