"""Do the outputs of all samples become one output, because the loss is lowest there?"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import copied, mapped, size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

FEWEST = 3  # samples of the batch
LEFT = 0.5  # share of the outputs' variation that is left after training
_AS_LOW = 1e-2  # share of the fall of the loss: what training has still to go


@asks("collapsed")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """See how much less outputs vary after training, where one output for all gives as low a loss.

    Before training, all samples get the outputs of the first one, and then these times −1. A convex
    loss of outputs and targets is not below that of outputs of zero both times.
    """
    batch = setup.batches[0]
    size = size_of(batch)
    if size < FEWEST:
        raise Untold(f"the batch has fewer than {FEWEST} samples")
    start, end, *alike = (
        _passed(fork, batch, size, sign)
        for fork, sign in (
            (setup.fork(), 0),
            (setup.fork_like(trained), 0),
            (setup.fork(), 1),
            (setup.fork(), -1),
        )
    )
    if start.variation is None or end.variation is None:
        raise Untold("no trained module that the loss calls returns outputs of the samples")
    fall = start.loss - end.loss
    is_lowest = fall > 0 and all(x.loss <= end.loss + _AS_LOW * fall for x in alike)
    if not is_lowest or end.variation >= LEFT * start.variation:
        return ()
    numbers = {"before": start.variation, "after": end.variation}
    return (Fact("", {**numbers, "loss": max(x.loss for x in alike)}),)


class _Passed(NamedTuple):
    """One pass of a batch.

    Attributes:
        loss: The loss.
        variation: Variance over the samples of the last trained outputs that the loss receives,
            over their mean square; None: it receives none.
    """

    loss: float
    variation: float | None


def _passed(fork: Fork, batch: Any, size: int, sign: int) -> _Passed:
    """Run a fork's loss with the samples' own outputs (0), or the first one's times a sign.

    These are the outputs of the modules that no other module calls, if they depend on trained
    parameters: a teacher keeps its own. Every call with outputs of the same shape then gives the
    same ones, so two views of a sample do not differ either.
    """
    depth = 0
    outputs: list[Tensor] = []
    of_all: dict[torch.Size, Tensor] = {}

    def in_place_of(x: Tensor) -> Tensor:
        if not sign or not _is_of_samples(x, size):
            return x
        return of_all.setdefault(x.shape[1:], sign * x[0]).expand_as(x).clone()

    def before(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal depth
        depth -= 1
        if depth:
            return None
        outputs.extend(x for x in tensors(output) if _is_of_samples(x, size))
        return mapped(output, in_place_of)

    for module in fork.model.modules():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    with seeded(fork.seed), torch.enable_grad():
        loss = float(fork.loss(fork.model, copied(batch)).detach())
    return _Passed(loss, _variation(outputs[-1]) if outputs else None)


def _is_of_samples(x: Tensor, size: int) -> bool:
    return x.requires_grad and x.ndim > 0 and len(x) > 0 and len(x) % size == 0


def _variation(x: Tensor) -> float:
    x = x.detach().double()
    square = x.square().mean()
    return float(x.var(0, correction=0).mean() / square) if bool(square) else 0.0
