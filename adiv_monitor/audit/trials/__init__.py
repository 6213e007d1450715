"""Short runs of forks: other learning rates, one batch that is overfitted, and fixes."""

from adiv_monitor.audit.trials.trial import Cap, overfit, rate_trials, tried, untried

__all__ = ["Cap", "overfit", "rate_trials", "tried", "untried"]
