"""Moved to `adiv_monitor.diagnosis.diagnose`."""

from adiv_monitor.moved import moved

__getattr__ = moved(__name__, "adiv_monitor.diagnosis.diagnose")
