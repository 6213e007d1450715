"""The record of one run, and the rules that find faults in it: pure functions of reports."""

from adiv_monitor.diagnosis.diagnose import diagnose

__all__ = ["diagnose"]
