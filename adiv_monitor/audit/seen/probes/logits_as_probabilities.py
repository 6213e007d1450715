"""Does the loss take outputs for probabilities, although they may have any value?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

BATCHES = 2
# Relative to the first loss: outputs that equal the targets have a loss that is closer to 0 than
# `PERFECT`, and outputs of twice the targets one that is lower by at least `LOWER`.
PERFECT, LOWER = 0.05, 0.1
OUTSIDE = 0.05  # share of the trained model's outputs below 0 or above 1, at least


def ask(setup: Setup, trained: Fork) -> Probed:
    """Replace the outputs by the targets, of 0 and 1, and by twice the targets.

    A loss of logits is not zero where these equal the targets, and a loss of probabilities is
    nowhere lower. One that is zero there and lower beyond has its lowest value elsewhere.
    """
    losses = (0.0, 0.0)
    for batch in setup.batches[:BATCHES]:
        found = _beyond(setup.fork(), batch)
        if found is None:
            return Probed()
        losses = found
    x = trained_outputs(setup, trained)
    outside = 0.0 if x is None else float(((x < 0) | (x > 1)).float().mean())
    if outside < OUTSIDE:
        return Probed()
    return Probed((Fact("", {"at": losses[0], "beyond": losses[1], "outside": outside}),))


def trained_outputs(setup: Setup, trained: Fork) -> Tensor | None:
    """Return a trained model's outputs for the first batch; None: none are of floating point."""
    after = setup.fork()
    after.model.load_state_dict(trained.model.state_dict())
    outputs = Outputs(after.model)
    RepeatedLoss(after).of(setup.batches[0])
    return None if outputs.seen is None else outputs.seen.detach()


def _beyond(fork: Fork, batch: Any) -> tuple[float, float] | None:
    """Return the loss of the targets, and of twice the targets, as outputs; None: not lower."""
    outputs = Outputs(fork.model)
    loss = RepeatedLoss(fork)
    first = loss.of(batch)
    for target in as_outputs(outputs.seen, batch):
        outputs.instead = target
        at = loss.of(batch)
        if abs(at) < PERFECT * abs(first):
            outputs.instead = 2 * target
            beyond = loss.of(batch)
            if beyond < at - LOWER * abs(first):
                return at, beyond
    return None


class Outputs:
    """Notes a model's output of floating point, and replaces it if another is set."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: Tensor | None = None
        self.instead: Tensor | None = None
        model.register_forward_hook(self._replace)

    def _replace(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.instead is None:
            self.seen = next((x for x in tensors(output) if x.is_floating_point()), None)
            return None
        instead = self.instead
        return mapped(output, lambda x: instead.to(x.dtype) if x.shape == instead.shape else x)


def as_outputs(output: Tensor | None, batch: Any) -> Iterator[Tensor]:
    """Yield tensors of zeros and ones of a batch in the output's shape, or classes as such."""
    if output is None or output.ndim < 1:
        return
    for x in tensors(batch):
        is_pair = bool(((x == 0) | (x == 1)).all()) and bool(x.any()) and not bool(x.all())
        if x.numel() == output.numel() and is_pair:
            yield x.reshape(output.shape).to(output)
        elif output.ndim > 1 and not x.is_floating_point() and not x.is_complex():
            classes = output.shape[1]
            is_class = x.dtype != torch.bool and x.numel() * classes == output.numel()
            if is_class and classes > 1 and 0 <= int(x.min()) <= int(x.max()) < classes:
                places = x.reshape(len(output), *output.shape[2:]).long()
                yield functional.one_hot(places, classes).movedim(-1, 1).to(output)
