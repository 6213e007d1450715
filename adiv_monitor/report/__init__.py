"""The monitor's reports: plain, frozen data without tensors.

A measure is a float. NaN means "no direction" (a zero vector has none; it is shown as "–") or that
no sampled row has a gradient ("idle"), None means "not requested, or not defined for this layer".
`maths/measures.py` has the definitions.
"""

from adiv_monitor.report.alignment import ALIGNMENT_MEASURES, AlignmentReading
from adiv_monitor.report.attention import ATTENTION_MEASURES, AttentionReading
from adiv_monitor.report.extremes import Extreme, MeasureSummary, smallest
from adiv_monitor.report.layer import (
    MEASURES,
    NO_MAPS,
    REALISED_MEASURES,
    SIZES,
    WORST,
    LayerReading,
)
from adiv_monitor.report.step_report import Alarm, Spike, StepReport, Turn, taken

__all__ = [
    "ALIGNMENT_MEASURES",
    "ATTENTION_MEASURES",
    "MEASURES",
    "NO_MAPS",
    "REALISED_MEASURES",
    "SIZES",
    "WORST",
    "Alarm",
    "AlignmentReading",
    "AttentionReading",
    "Extreme",
    "LayerReading",
    "MeasureSummary",
    "Spike",
    "StepReport",
    "Turn",
    "smallest",
    "taken",
]
