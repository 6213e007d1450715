"""A layer's step with another map, other inputs or another learning rate, without retraining."""

from adiv_monitor.audit.what_if.alternatives import what_if
from adiv_monitor.diagnosis.record import Alternative

__all__ = ["Alternative", "what_if"]
