"""Findings about one run: rules that are pure functions of its record."""

from adiv_monitor.audit.diagnosis.diagnose import diagnose

__all__ = ["diagnose"]
