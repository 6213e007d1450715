"""The fixes that can be tried, by name; importing their files registers them."""

from adiv_monitor.audit.trials.fixes import calls, layers, optimizer
from adiv_monitor.audit.trials.fixes.fix import FIXES, DoesNotApply, Fix

__all__ = ["FIXES", "DoesNotApply", "Fix", "calls", "layers", "optimizer"]
