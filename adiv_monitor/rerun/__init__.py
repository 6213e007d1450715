"""Reruns of calls of a training step, without side effects on the training run.

When a call is made, `Surroundings` records what it depends on besides its inputs and parameters.
The rerun happens inside `untouched`, which restores all state afterwards. Whole forward passes are
repeated with the original modules; a single module is rerun as a `Twin`, a function of its
parameters. `jvp` computes the derivative of such a function by its parameters.
"""
