"""Short runs of forks: other learning rates, one batch that is overfitted, and fixes."""

from adiv_monitor.audit.trials.search import with_edits
from adiv_monitor.audit.trials.trial import Cap, overfit, rate_trials, tried, untried

__all__ = ["Cap", "overfit", "rate_trials", "tried", "untried", "with_edits"]
