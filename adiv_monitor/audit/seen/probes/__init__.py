"""Probes: each asks one question about copies of the model, in a file of its own.

A probe receives the setup and a trained fork, and makes forks of its own. It does not change the
run, and uses none of its random numbers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from adiv_monitor.audit.seen.probes import (
    attention_axis,
    attention_saturated,
    batch_norm_starved,
    batches_drawn,
    behind_reference,
    bounded_logits,
    broadcast_loss,
    changed_outputs,
    class_untaught,
    class_weights,
    collapsed,
    constant_data,
    dropout_too_high,
    epsilon_dominates,
    gradient_cut,
    gradient_differs,
    gradient_hooks,
    hidden_parameters,
    input_partly_ignored,
    label_smoothing,
    left_in_eval,
    logits_as_probabilities,
    loss_reversed,
    no_activation,
    no_log,
    one_sided_weights,
    order_ignored,
    outputs_constant,
    padding_counts,
    penalty_dominates,
    rate_zero,
    reshape_scrambles,
    rounded_away,
    samples_mixed,
    sequences,
    softmax_axes,
    target_leak,
    targets_misplaced,
    targets_moved,
    targets_out_of_range,
    unbounded_loss,
    unsafe_division,
    zero_gradient,
    zero_slope,
)
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Probed

Probe = Callable[[Setup, Fork], Probed]

PROBES: Mapping[str, Probe] = MappingProxyType(
    {
        "hidden-parameters": hidden_parameters.ask,
        "rate-zero": rate_zero.ask,
        "rounded-away": rounded_away.ask,
        "gradient-hooks": gradient_hooks.ask,
        "left-in-eval": left_in_eval.ask,
        "samples-mixed": samples_mixed.ask,
        "reshape-scrambles": reshape_scrambles.ask,
        "gradient-cut": gradient_cut.ask,
        "gradient-differs": gradient_differs.ask,
        "no-activation": no_activation.ask,
        "attention-axis": attention_axis.ask,
        "attention-saturated": attention_saturated.ask,
        "future-leak": sequences.future_leak,
        "targets-misplaced": targets_misplaced.ask,
        "broadcast-loss": broadcast_loss.ask,
        "no-log": no_log.ask,
        "logits-as-probabilities": logits_as_probabilities.ask,
        "loss-reversed": loss_reversed.ask,
        "softmax-of-one": softmax_axes.of_one,
        "softmax-over-samples": softmax_axes.over_samples,
        "targets-out-of-range": targets_out_of_range.ask,
        "dropout-on-outputs": changed_outputs.dropout,
        "outputs-normalised": changed_outputs.normalised,
        "target-is-input": sequences.target_is_input,
        "zero-slope": zero_slope.ask,
        "label-smoothing": label_smoothing.ask,
        "class-weights": class_weights.ask,
        "class-untaught": class_untaught.ask,
        "padding-counts": padding_counts.ask,
        "penalty-dominates": penalty_dominates.ask,
        "unsafe-division": unsafe_division.ask,
        "constant-data": constant_data.ask,
        "target-leak": target_leak.ask,
        "targets-moved": targets_moved.ask,
        "same-batch": batches_drawn.same_batch,
        "unshuffled": batches_drawn.unshuffled,
        "one-sided-weights": one_sided_weights.ask,
        "input-partly-ignored": input_partly_ignored.ask,
        "order-ignored": order_ignored.ask,
        "outputs-constant": outputs_constant.ask,
        "collapsed": collapsed.ask,
        "bounded-logits": bounded_logits.ask,
        "batch-norm-starved": batch_norm_starved.ask,
        "dropout-too-high": dropout_too_high.ask,
        "epsilon-dominates": epsilon_dominates.ask,
        "zero-gradient": zero_gradient.ask,
        "unbounded-loss": unbounded_loss.ask,
        "behind-reference": behind_reference.ask,
    }
)


def asked(setup: Setup, trained: Fork) -> dict[str, Probed]:
    """Return the result of each probe by its name; a failed probe has a reason, no facts."""
    found = {}
    for name, probe in PROBES.items():
        try:
            found[name] = probe(setup, trained)
        except Exception as error:  # a copy may not run with the probe's inputs
            said = str(error).partition("\n")[0]
            found[name] = Probed(untold=f"{type(error).__name__}: {said}")
    return found
