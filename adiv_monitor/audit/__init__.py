"""A diagnosis of a training run: what is wrong, how sure that is, and a mend that was tried."""
