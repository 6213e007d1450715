"""Does the loss take outputs for probabilities, although they may have any value?"""

from collections.abc import Iterable

from torch import Tensor

from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.experiments.replaced_outputs import (
    Answered,
    Losses,
    in_batches,
    trained_outputs,
)
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

# Relative to the first loss: outputs that equal the targets have a loss that is closer to 0 than
# `PERFECT`, and outputs of twice the targets one that is lower by at least `LOWER`.
PERFECT, LOWER = 0.05, 0.1
OUTSIDE = 0.05  # share of the trained model's outputs below 0 or above 1, at least


@asks("logits-as-probabilities")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Replace the outputs by the targets, of 0 and 1, and by twice the targets.

    A loss of logits is not zero where these equal the targets, and a loss of probabilities is
    nowhere lower. One that is zero there and lower beyond has its lowest value elsewhere.
    """
    losses = in_batches(setup, _beyond)
    if losses is None:
        return ()
    x = trained_outputs(setup, trained)
    outside = 0.0 if x is None else float(((x < 0) | (x > 1)).float().mean())
    if outside < OUTSIDE:
        return ()
    return (Fact("", {"at": losses[0], "beyond": losses[1], "outside": outside}),)


def _beyond(of: Answered, target: Tensor) -> Losses | None:
    """Return the loss of the targets, and of twice the targets, as outputs; None: not lower."""
    at = of.loss(target)
    if abs(at) >= PERFECT * abs(of.first):
        return None
    beyond = of.loss(2 * target)
    return (at, beyond) if beyond < at - LOWER * abs(of.first) else None
