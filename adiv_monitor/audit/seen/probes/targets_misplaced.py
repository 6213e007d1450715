"""Are the outputs of a sample compared with the targets of the same sample?"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.seen.changed_inputs import still
from adiv_monitor.audit.training.batches import copied, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact, Probed

FEWEST = 4  # samples of the batch
# A sample's targets may concern this many times its share of the outputs; where they concern more,
# the loss compares each target with several samples.
ITS_SHARE = 1.5


def ask(setup: Setup, trained: Fork) -> Probed:
    """Change the first sample's inputs, then its targets, and see which outputs these concern.

    Inputs concern the outputs that change and have a gradient. Targets, which change no outputs,
    concern those whose gradient changes. The share that both concern, of the fewer ones, is 1 if
    they belong together.
    """
    batch = setup.batches[0]
    size = size_of(batch)
    if size < FEWEST:
        return Probed(untold=f"the batch has fewer than {FEWEST} samples")
    own = _pass(setup, batch)
    if not len(own.outputs):
        return Probed(untold="the loss calls no model that returns numbers")
    of_inputs = of_targets = torch.zeros(len(own.outputs), dtype=torch.bool)
    shapes = []
    for number, x in enumerate(tensors(batch)):
        if not x.ndim or len(x) != size or (other := _other(x)) is None:
            continue
        changed = _pass(setup, _exchanged(batch, number, other))
        if changed.outputs.shape != own.outputs.shape:
            return Probed(untold="the number of outputs depends on the inputs")
        moved = changed.outputs != own.outputs
        if bool(moved.any()):
            of_inputs = of_inputs | (moved & (own.gradients != 0))
        else:
            of_targets = of_targets | (changed.gradients != own.gradients)
            shapes.append(str(tuple(x.shape)))
    if int(of_targets.sum()) > ITS_SHARE * int((own.gradients != 0).sum()) / size:
        return Probed(untold="the loss compares each target with several samples")
    fewer = min(int(of_inputs.sum()), int(of_targets.sum()))
    if not fewer:
        return Probed(untold="the batch holds no inputs and targets apart")
    share = float((of_inputs & of_targets).sum()) / fewer
    return Probed((Fact("", {"share": share}, {"of": own.shape, "to": ", ".join(shapes)}),))


class _Pass(NamedTuple):
    """All outputs of the model's calls in one loss, and the loss's gradients there, flat."""

    outputs: Tensor
    gradients: Tensor
    shape: str


def _pass(setup: Setup, batch: Any) -> _Pass:
    """Return the outputs and gradients for a batch, without dropout and batch statistics."""
    fork = still(setup.fork())
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(x for x in tensors(output) if x.is_floating_point() and x.requires_grad)

    fork.model.register_forward_hook(note)
    with seeded(setup.seed), torch.enable_grad():
        loss = fork.loss(fork.model, copied(batch))
    if not seen or not loss.requires_grad:
        return _Pass(torch.empty(0), torch.empty(0), "")
    found = torch.autograd.grad(loss, seen, allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(seen, found, strict=True))
    return _Pass(
        torch.cat([x.detach().flatten() for x in seen]),
        torch.cat([g.flatten() for g in zeros]),
        str(tuple(seen[0].shape)),
    )


def _other(x: Tensor) -> int | None:
    """Return the first sample that differs from the first one; None: all are alike."""
    differ = (x != x[:1]).reshape(len(x), -1).any(1).nonzero()
    return int(differ[0]) if len(differ) else None


def _exchanged(batch: Any, number: int, other: int) -> Any:
    """Return a batch whose tensor of this number has another sample's part in the first one."""
    wanted = list(tensors(batch))[number]

    def put(x: Tensor) -> Tensor:
        if x is not wanted:
            return x
        changed = x.clone()
        changed[0] = x[other]
        return changed

    return mapped(batch, put)
