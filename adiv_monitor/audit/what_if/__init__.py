"""What a layer's step would be with another map, inputs or rate, without training again."""

from adiv_monitor.audit.what_if.alternatives import what_if
from adiv_monitor.diagnosis.record import Alternative

__all__ = ["Alternative", "what_if"]
