"""Monitors how far each layer's activation update is from the ideal one during training."""

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
