"""Moved to `adiv_monitor.diagnosis.record`."""

from adiv_monitor.moved import moved

__getattr__ = moved(__name__, "adiv_monitor.diagnosis.record")
