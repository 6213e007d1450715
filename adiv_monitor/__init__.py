"""Measure, layer by layer, how far each optimizer step moves activations, and whether downhill."""

from adiv_monitor.audit import audit
from adiv_monitor.errors import AdivError, AlarmError
from adiv_monitor.monitor import Monitor
from adiv_monitor.report import AlignmentReading, AttentionReading, LayerReading, StepReport

__version__ = "0.1.0"

__all__ = [
    "AdivError",
    "AlarmError",
    "AlignmentReading",
    "AttentionReading",
    "LayerReading",
    "Monitor",
    "StepReport",
    "audit",
]
