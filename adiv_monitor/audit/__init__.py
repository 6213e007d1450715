"""A diagnosis of a training run: its faults, how sure they are, and the fixes that were tried."""

from adiv_monitor.audit.audit import audit

__all__ = ["audit"]
