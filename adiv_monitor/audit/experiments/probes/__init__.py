"""All questions: importing their files registers them."""

# ruff: noqa: F401
from adiv_monitor.audit.experiments import (
    attention,
    backward,
    data,
    exchange,
    modules,
    operands,
    reference,
    reshapes,
    sequences,
    state,
    terms,
)
from adiv_monitor.audit.experiments.probes import (
    bounded_logits,
    broadcast_loss,
    changed_outputs,
    class_weights,
    label_smoothing,
    logits_as_probabilities,
    loss_reversed,
    no_log,
    softmax_axes,
    targets_misplaced,
    targets_out_of_range,
    zero_gradient,
)
