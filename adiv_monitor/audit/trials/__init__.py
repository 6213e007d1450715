"""Short runs of forks: other learning rates, one batch that is overfitted, and fixes."""

from adiv_monitor.audit.trials.trial import overfit, rate_trials, tried, untried

__all__ = ["overfit", "rate_trials", "tried", "untried"]
