"""Reruns of calls of a training step, without side effects on the training run.

`Surroundings` records what a call depends on besides its inputs and parameters. `untouched` runs
modules in place, with other parameters for a while, and restores all state; the probe, alignment
and `Twin`, a module's forward as a function of its parameters, stand on it. `jvp` computes the
derivative of such a function.
"""
