"""Does the loss keep falling if the weights move on in the direction of the run?"""

import math

import torch
from torch import Tensor

from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

FURTHER = 64.0  # times as far as the run went, by doublings
PACE = 0.5  # of the run's own decrease by distance, at least, in each doubling


def ask(setup: Setup, trained: Fork) -> Probed:
    """Compute the first batch's loss further along the line from the first to the last weights.

    A loss with a minimum rises there, or falls more slowly. One without a lower bound falls by at
    least `PACE` times as much per distance as in the run.
    """
    fork = setup.fork()
    loss, batch = RepeatedLoss(fork), setup.batches[0]
    begin = [p.detach().clone() for p in fork.model.parameters()]
    ends = [p.detach() for p in trained.model.parameters()]
    if trained.optimizer._optimizer_step_post_hooks:
        return Probed(untold="a hook behind the step may keep the weights within bounds")

    def at(distance: float) -> float:
        _place(list(fork.model.parameters()), begin, ends, distance)
        return loss.of(batch)

    first, last = at(0.0), at(1.0)
    if not last < min(0.0, first):
        return Probed()
    before, distance = last, 1.0
    while distance < FURTHER:
        value = at(2 * distance)
        if math.isnan(value) or not before - value >= PACE * (first - last) * distance:
            return Probed()
        if math.isinf(value):
            break
        before, distance = value, 2 * distance
    return Probed((Fact("", {"loss": before, "times": distance}),))


@torch.no_grad()
def _place(
    parameters: list[Tensor], begin: list[Tensor], ends: list[Tensor], distance: float
) -> None:
    for parameter, start, end in zip(parameters, begin, ends, strict=True):
        parameter.copy_(start + distance * (end - start))
