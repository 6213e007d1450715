"""Moved to `adiv_monitor.diagnosis`."""

from adiv_monitor.audit.diagnosis import diagnose
from adiv_monitor.moved import moved

del diagnose  # the module, which must not stand for the function of its name
__getattr__ = moved(__name__, "adiv_monitor.diagnosis")
