"""Which outputs of a model the inputs and the targets of a batch concern."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import see_calls
from adiv_monitor.audit.experiments.changed_inputs import still
from adiv_monitor.audit.training.batches import copied, first, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Setup, seeded

SAMPLES = 8  # most samples of a batch, so that large models take little time


def few(setup: Setup, batch: Any) -> Any:
    """Return a few samples of a batch; all of them if the loss can't be computed for a few."""
    cut = first(batch, SAMPLES)
    if cut is batch:
        return batch
    try:
        with torch.set_grad_enabled(setup.differentiates):
            see_calls(still(setup.fork()), lambda call: None, cut)
    except Exception:  # the model works with one batch size only
        return batch
    return cut


def of_few(setup: Setup) -> Setup:
    """Return the setup with a few samples of each batch, if the loss can be computed for them."""
    if few(setup, setup.batches[0]) is setup.batches[0]:
        return setup
    cut = {id(batch): first(batch, SAMPLES) for batch in setup.batches}  # some are given again
    return replace(setup, batches=tuple(cut[id(batch)] for batch in setup.batches))


class Pass(NamedTuple):
    """The outputs of all of the model's calls in one loss, and the loss's gradients there, flat.

    Attributes:
        outputs: the outputs that have a gradient.
        gradients: the gradients.
        shape: shape of the first output.
    """

    outputs: Tensor
    gradients: Tensor
    shape: str


def passed(setup: Setup, batch: Any) -> Pass:
    """Return outputs and gradients for a batch, without dropout and batch statistics."""
    fork = still(setup.fork())
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(x for x in tensors(output) if x.is_floating_point() and x.requires_grad)

    fork.model.register_forward_hook(note)
    with seeded(setup.seed), torch.enable_grad():
        loss = fork.loss(fork.model, copied(batch))
    if not seen or not loss.requires_grad:
        return Pass(torch.empty(0), torch.empty(0), "")
    found = torch.autograd.grad(loss, seen, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(seen, found, strict=True))
    return Pass(
        torch.cat([x.detach().flatten() for x in seen]),
        torch.cat([g.flatten() for g in zeros]),
        str(tuple(seen[0].shape)),
    )


def with_tensor(batch: Any, number: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with its tensor of this number changed."""
    wanted = list(tensors(batch))[number]
    return mapped(batch, lambda x: change(x) if x is wanted else x)


def only_target(setup: Setup, batch: Any) -> Tensor | None:
    """Return the only tensor that changes gradients, and no outputs, if samples exchange theirs.

    None: no tensor does, or several do: one may be a mask or a weight.
    """
    own, size = passed(setup, batch), size_of(batch)
    found = []
    for number, x in enumerate(tensors(batch)):
        if not x.ndim or len(x) != size:
            continue
        other = passed(setup, with_tensor(batch, number, lambda y: y.roll(1, 0)))
        is_input = not torch.equal(other.outputs, own.outputs)
        if not is_input and not torch.equal(other.gradients, own.gradients):
            found.append(x)
    return found[0] if len(found) == 1 else None
