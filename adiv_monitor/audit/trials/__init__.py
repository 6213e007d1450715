"""Short runs of forks: other learning rates, one batch learnt by heart, and mends."""

from adiv_monitor.audit.trials.by_heart import overfit
from adiv_monitor.audit.trials.rates import rate_trials
from adiv_monitor.audit.trials.tried import tried

__all__ = ["overfit", "rate_trials", "tried"]
