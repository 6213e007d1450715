"""Moved to `adiv_monitor.diagnosis.finding`."""

from adiv_monitor.moved import moved

__getattr__ = moved(__name__, "adiv_monitor.diagnosis.finding")
