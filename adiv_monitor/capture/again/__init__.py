"""Running parts of a step again, unseen by the run: modules as a whole, and forward passes."""
