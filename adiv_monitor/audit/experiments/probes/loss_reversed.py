"""Is the loss lower, the more the outputs contradict the targets?"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.concerned import only_target
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.experiments.replaced_outputs import (
    BATCHES,
    Answered,
    Losses,
    in_batches,
    trained_outputs,
)
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

LOGIT = 8.0
NEGATIONS = ("neg", "negative", "__neg__", "softmin")
LOWER = 0.1  # of the first loss: the least by which contradicting outputs have the lower loss


@asks("loss-reversed")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Replace the outputs by the targets, of 0 and 1, and by their opposite.

    This is done as probabilities, p and 1 − p, and as logits, ±8, because a loss of probabilities
    may not tell logits apart. Distances, which are never negative, and energies, which the loss
    negates, may be meant to contradict. A surrogate, as in policy gradients, has the right gradient
    whatever its value is: nothing is found unless the training makes the outputs agree less.
    """
    losses = in_batches(setup, _preferred)
    if losses is None or not _unlearns(setup, trained):
        return ()
    outputs = trained_outputs(setup, trained)
    is_signed = outputs is not None and bool((outputs < 0).any())
    kind = "energies" if _negates_outputs(setup.fork()) else "signed" if is_signed else "positive"
    numbers = {"right": losses[0], "wrong": losses[1]}
    return (Fact("", numbers, {"outputs": kind}),)


def _unlearns(setup: Setup, trained: Fork) -> bool:
    """Return whether a trained model's outputs agree less with the targets than at the start."""
    less = []
    for batch in setup.batches[:BATCHES]:
        wanted = only_target(setup, batch)
        before, after = (Answered(x, batch) for x in (setup.fork(), setup.fork_like(trained)))
        for x, target in before.targets:
            if x is wanted:
                # Outputs that are no longer finite do not show that the training is a good one.
                less.append(not _agreement(after, target) >= _agreement(before, target))
    return bool(less) and all(less)


def _agreement(of: Answered, target: Tensor) -> float:
    """Return by how much the outputs are higher where the target is 1 than where it is 0."""
    assert of.outputs is not None
    return float(of.outputs[target == 1].mean() - of.outputs[target == 0].mean())


def _negates_outputs(fork: Fork) -> bool:
    """Return whether the loss takes the negative of the model's outputs."""
    made: list[Tensor] = []
    found: list[Call] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        made.extend(tensors(output))

    def look(call: Call) -> None:
        if call.name in NEGATIONS and any(call.argument(0, "input") is x for x in made):
            found.append(call)

    fork.model.register_forward_hook(note)
    with torch.no_grad():
        see_calls(fork, look)
    return bool(found)


def _preferred(of: Answered, target: Tensor) -> Losses | None:
    """Return the losses of right and of wrong logits; None: that of the right ones is lower."""
    logits = LOGIT * (2 * target - 1)
    pairs = [(of.loss(x), of.loss(y)) for x, y in ((target, 1 - target), (logits, -logits))]
    is_reversed = all(right - wrong > LOWER * abs(of.first) for right, wrong in pairs)
    return pairs[-1] if is_reversed else None
