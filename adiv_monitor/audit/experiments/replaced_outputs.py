"""A model's outputs, noted or replaced by others, such as the targets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adiv_monitor.audit.experiments.concerned import few, only_target
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, tensors
from adiv_monitor.audit.training.setup import Fork, Setup

BATCHES = 2
Losses = tuple[float, float]


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


class Answered:
    """The loss of a batch for any outputs of the model.

    Attributes:
        first: the loss of the model's own outputs.
        outputs: the model's own outputs; None: none are of floating point.
        targets: tensors of the batch that may be its targets, of 0 and 1, or classes, each with
            what it is in the shape of the outputs.
    """

    def __init__(self, fork: Fork, batch: Any) -> None:
        self._batch, self._outputs, self._loss = batch, Outputs(fork.model), RepeatedLoss(fork)
        self.first = self._loss.of(batch)
        output = self._outputs.seen
        self.outputs = None if output is None else output.detach()
        self.targets = [
            (x, target)
            for x in tensors(batch)
            if output is not None and (target := _as_output(output, x)) is not None
        ]

    def loss(self, outputs: Tensor) -> float:
        """Return the loss of these outputs."""
        self._outputs.instead = outputs
        return self._loss.of(self._batch)


def in_batches(setup: Setup, find: Callable[[Answered, Tensor], Losses | None]) -> Losses | None:
    """Return what is found in the last of some batches; None: in one of them, nothing is."""
    found = None
    for whole in setup.batches[:BATCHES]:
        batch = few(setup, whole)
        found, of = None, Answered(setup.fork(), batch)
        for x, target in of.targets:
            losses = find(of, target)
            if losses is not None and only_target(setup, batch) is x:
                found = losses
        if found is None:
            return None
    return found


def trained_outputs(setup: Setup, trained: Fork) -> Tensor | None:
    """Return a trained model's outputs for the first batch; None: none are of floating point."""
    after = setup.fork_like(trained)
    outputs = Outputs(after.model)
    RepeatedLoss(after).of(setup.batches[0])
    return None if outputs.seen is None else outputs.seen.detach()


def _as_output(output: Tensor, x: Tensor) -> Tensor | None:
    """Return targets of zeros and ones, or classes as such, in the output's shape; else None."""
    if output.ndim < 1 or x.is_complex():
        return None
    is_pair = bool(((x == 0) | (x == 1)).all()) and bool(x.any()) and not bool(x.all())
    if x.numel() == output.numel() and is_pair:
        return x.reshape(output.shape).to(output)
    if output.ndim < 2 or x.is_floating_point() or x.dtype is torch.bool:
        return None
    classes = output.shape[1]
    is_class = x.numel() * classes == output.numel() and classes > 1
    if not is_class or not 0 <= int(x.min()) <= int(x.max()) < classes:
        return None
    places = x.reshape(len(output), *output.shape[2:]).long()
    return functional.one_hot(places, classes).movedim(-1, 1).to(output)
