"""Does the loss keep falling if the weights move on in the direction of the run?"""

import math
import operator
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.concerned import passed, with_tensor
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

FURTHER = 64.0  # times as far as the run went, by doublings
PACE = 0.5  # of the run's own decrease by distance, at least, in each doubling
WIDE = 1e4  # times the weights of the samples, and minus that: a distance is not linear so far
LINEAR = 1e-3  # largest share of a linear change by which the two may differ


@asks("unbounded-loss")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Compute the first batch's loss further along the line from the first to the last weights.

    A loss with a minimum rises there, or falls more slowly. One without a lower bound falls by at
    least `PACE` times as much per distance as in the run. The fact says whether samples have
    negative weights, as the rewards of a policy gradient are.
    """
    fork = setup.fork()
    loss, batch = RepeatedLoss(fork), setup.batches[0]
    begin = [p.detach().clone() for p in fork.model.parameters()]
    ends = [p.detach() for p in trained.model.parameters()]
    if trained.optimizer._optimizer_step_post_hooks:
        raise Untold("a hook behind the step may keep the weights within bounds")

    def at(distance: float) -> float:
        _place(list(fork.model.parameters()), begin, ends, distance)
        return loss.of(batch)

    first, last = at(0.0), at(1.0)
    if not last < min(0.0, first):
        return ()
    before, distance = last, 1.0
    while distance < FURTHER:
        value = at(2 * distance)
        if math.isnan(value) or not before - value >= PACE * (first - last) * distance:
            return ()
        if math.isinf(value):
            break
        before, distance = value, 2 * distance
    at(0.0)
    numbers = {"loss": before, "times": distance, "negative": _negative_weights(setup, loss, batch)}
    return (Fact("", numbers),)


def _negative_weights(setup: Setup, loss: RepeatedLoss, batch: Any) -> int:
    """Return the number of samples with a negative weight.

    Weights change gradients, but no outputs, and the loss is linear in them.
    """
    own = None
    for number, x in enumerate(tensors(batch)):
        if not x.is_floating_point() or x.numel() != size_of(batch) or not bool((x < 0).any()):
            continue
        times = [partial(operator.mul, factor) for factor in (-WIDE, 0.0, WIDE)]
        below, none, above = (loss.of(with_tensor(batch, number, scaled)) for scaled in times)
        change = abs(above - none)
        if not change > 0 or abs(above + below - 2 * none) >= LINEAR * change:
            continue
        own = own or passed(setup, batch)
        turned = passed(setup, with_tensor(batch, number, operator.neg))
        is_input = not torch.equal(turned.outputs, own.outputs)
        if not is_input and not torch.equal(turned.gradients, own.gradients):
            return int((x < 0).sum())
    return 0


@torch.no_grad()
def _place(
    parameters: list[Tensor], begin: list[Tensor], ends: list[Tensor], distance: float
) -> None:
    for parameter, start, end in zip(parameters, begin, ends, strict=True):
        parameter.copy_(start + distance * (end - start))
