"""Is the loss lower, the more the outputs contradict the targets?"""

from typing import Any

from torch import Tensor

from adiv_monitor.audit.seen.probes.logits_as_probabilities import (
    Outputs,
    as_outputs,
    trained_outputs,
)
from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

BATCHES = 2
LOGIT = 8.0
# Relative to the first loss: the least by which outputs that contradict all targets have the lower
# loss.
LOWER = 0.1


def ask(setup: Setup, trained: Fork) -> Probed:
    """Replace the outputs by the targets, of 0 and 1, and by their opposite.

    This is done as probabilities, p and 1 − p, and as logits, ±8: a loss of the one may hardly
    tell the other apart. Distances, which are never negative, may be meant to contradict labels.
    """
    losses = (0.0, 0.0)
    for batch in setup.batches[:BATCHES]:
        found = _preferred(setup.fork(), batch)
        if found is None:
            return Probed()
        losses = found
    outputs = trained_outputs(setup, trained)
    is_signed = outputs is not None and bool((outputs < 0).any())
    words = {"outputs": "signed" if is_signed else "positive"}
    return Probed((Fact("", {"right": losses[0], "wrong": losses[1]}, words),))


def _preferred(fork: Fork, batch: Any) -> tuple[float, float] | None:
    """Return the losses of right and of wrong logits; None: that of the right ones is lower."""
    outputs = Outputs(fork.model)
    loss = RepeatedLoss(fork)
    first = loss.of(batch)
    for target in as_outputs(outputs.seen, batch):

        def of(x: Tensor) -> float:
            outputs.instead = x
            return loss.of(batch)

        logits = LOGIT * (2 * target - 1)
        pairs = [(of(x), of(y)) for x, y in ((target, 1 - target), (logits, -logits))]
        if all(right - wrong > LOWER * abs(first) for right, wrong in pairs):
            return pairs[-1]
    return None
