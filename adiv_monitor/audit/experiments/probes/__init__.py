"""All questions: importing their files registers them."""

# ruff: noqa: F401
from adiv_monitor.audit.experiments import (
    backward,
    data,
    exchange,
    reference,
    sequences,
    state,
    terms,
)
from adiv_monitor.audit.experiments.probes import (
    attention_axis,
    attention_saturated,
    batch_norm_starved,
    bounded_logits,
    broadcast_loss,
    changed_outputs,
    class_weights,
    collapsed,
    dropout_too_high,
    hidden_parameters,
    label_smoothing,
    left_in_eval,
    logits_as_probabilities,
    loss_reversed,
    no_activation,
    no_log,
    one_sided_weights,
    outputs_constant,
    reshape_scrambles,
    softmax_axes,
    targets_misplaced,
    targets_out_of_range,
    unsafe_division,
    zero_gradient,
)
