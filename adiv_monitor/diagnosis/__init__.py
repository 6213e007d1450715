"""The record of one run, and what rules find in it: pure functions of reports, and their words."""

from adiv_monitor.diagnosis.diagnose import diagnose

__all__ = ["diagnose"]
