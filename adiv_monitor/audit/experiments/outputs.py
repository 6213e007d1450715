"""A superfluous activation function between outputs and loss."""

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.diagnosis.record import ActivatedOutput

# Losses that apply a softmax or a sigmoid of their own to their input.
WITH_THEIR_OWN = ("cross_entropy", "log_softmax", "binary_cross_entropy_with_logits")


def activated_output(fork: Fork) -> ActivatedOutput | None:
    """Return the activation function of `activation_of_logits`, without its call."""
    found = activation_of_logits(fork)
    return None if found is None else ActivatedOutput(found[0], found[1].path)


def activation_of_logits(fork: Fork) -> tuple[str, Call] | None:
    """Find the activation function, or softmax, whose outputs the loss takes for logits.

    Its outputs go unchanged into a loss that has a softmax or sigmoid of its own. None: there is no
    such function, or the forward pass fails.
    """
    # Outputs by their memory, with their version: a view is the same output, a tensor that was
    # written to in place is not. They are held so that their memory is not reused.
    made: dict[int, tuple[Tensor, int, tuple[str, Call]]] = {}
    found: tuple[str, Call] | None = None

    def see(call: Call) -> None:
        nonlocal found
        given, result = call.argument(0, "input"), call.result
        if call.name in WITH_THEIR_OWN and isinstance(given, Tensor):
            known = made.get(given.untyped_storage().data_ptr())
            if known is not None and known[1] == given._version:
                found = known[2]
        if isinstance(result, Tensor) and result.is_floating_point():
            is_softmax = call.name == "softmax"
            ends = (call.name, None) if is_softmax else ends_of_function(call.name, call.kwargs)
            if ends is not None:
                where = result.untyped_storage().data_ptr()
                made[where] = result, result._version, (ends[0], call)

    try:
        with torch.no_grad():
            see_calls(fork, see)
    except Exception:  # the training run reports errors of the loss
        return None
    return found
