"""Faults between outputs and loss: a superfluous activation function, parts that oppose each other.

Both are examined at the initial weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, mapped
from adiv_monitor.audit.training.samples import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import ActivatedOutput

# Losses that apply a softmax or a sigmoid of their own to their input.
WITH_THEIR_OWN = ("cross_entropy", "log_softmax", "binary_cross_entropy_with_logits")
_LARGE = 100_000_000  # parameters; no float64 copy of a larger model is made
_SAMPLES = 2
_MOST = 4  # most parts of a model that are taken for players
_SHORT = 1e-6  # relative to the weights' length, and to the loss
_AGREE = 0.05  # largest relative difference of the slopes of two steps


def activated_output(fork: Fork) -> ActivatedOutput | None:
    """Return the activation function of `activation_of_logits`, without its call."""
    found = activation_of_logits(fork)
    return None if found is None else ActivatedOutput(found[0], found[1].path)


def activation_of_logits(fork: Fork) -> tuple[str, Call] | None:
    """Find the activation function, or softmax, whose outputs the loss takes for logits.

    Its outputs go unchanged into a loss that has a softmax or sigmoid of its own. None: there is no
    such function, or the forward pass fails.
    """
    # Outputs by their memory, with their version: a view is the same output, a tensor that was
    # written to in place is not. They are held so that their memory is not reused.
    made: dict[int, tuple[Tensor, int, tuple[str, Call]]] = {}
    found: tuple[str, Call] | None = None

    def see(call: Call) -> None:
        nonlocal found
        given, result = call.argument(0, "input"), call.result
        if call.name in WITH_THEIR_OWN and isinstance(given, Tensor):
            known = made.get(given.untyped_storage().data_ptr())
            if known is not None and known[1] == given._version:
                found = known[2]
        if isinstance(result, Tensor) and result.is_floating_point():
            is_softmax = call.name == "softmax"
            ends = (call.name, None) if is_softmax else ends_of_function(call.name, call.kwargs)
            if ends is not None:
                where = result.untyped_storage().data_ptr()
                made[where] = result, result._version, (ends[0], call)

    try:
        with torch.no_grad():
            see_calls(fork, see)
    except Exception:  # the training run reports errors of the loss
        return None
    return found


def descent_share(setup: Setup) -> float | None:
    """Return how much a few samples' loss falls along its gradient, relative to ‖gradient‖².

    (L(θ + hg) − L(θ − hg)) / (2h‖g‖²) as h → 0, with the same random numbers, in float64. It is 1
    if g is the gradient of the loss. It is less, or below 0, if parts of the loss oppose one
    another, as in the summed loss of a generative adversarial network, each of whose players has
    its own part of the gradient. So the model's parts are moved one by one, and the smallest share
    counts.

    Returns:
        The share; None if it is unknown: the model has one part, or too many for players; it is
        large, or does not run in float64; the loss changes weights; there is no gradient; steps of
        two lengths disagree.
    """
    size = sum(p.numel() for p in setup.model.parameters())
    if size > _LARGE or not 1 < len(_parts(setup.model)) <= _MOST:
        return None
    batch = mapped(first(setup.batches[0], _SAMPLES), in_float64)
    with seeded(setup.seed), made_in_float64():
        try:
            fork = setup.fork()
            fork.model.double()
            repeated = RepeatedLoss(fork)
            loss = fork.loss(fork.model, copied(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            lines = [_Line(repeated, batch, list(part.parameters())) for part in _parts(fork.model)]
            shares = [line.share(abs(float(loss.detach()))) for line in lines]
        except Exception:  # the training run reports errors of the loss
            return None
    return min((share for share in shares if share is not None), default=None)


def in_float64(x: Tensor) -> Tensor:
    """Return the tensor in float64; integers and truth values stay as they are."""
    return x.double() if x.is_floating_point() else x


@contextmanager
def made_in_float64() -> Iterator[None]:
    """Make float64 the default dtype in a block, so that noise that a loss draws has it, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the model's children that hold parameters; of an only child, its children."""
    parts = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(parts) == 1:
        return _parts(parts[0])
    return parts


class _Line:
    """The loss along the gradient of some parameters."""

    def __init__(self, loss: RepeatedLoss, batch: Any, parameters: Sequence[Tensor]) -> None:
        self._repeated = loss
        self._batch = batch
        self._moved = [(p, p.detach().clone(), p.grad.to_dense())
                       for p in parameters if p.grad is not None]  # fmt: skip

    def share(self, loss: float) -> float | None:
        """Return the share of a short step.

        If it is not 1, a shorter step must have the same slope, or else the result is None.
        """
        lengths = [
            sum(float(x.square().sum()) for x in tensors)
            for tensors in ([g for *_, g in self._moved], [p for _, p, _ in self._moved])
        ]
        square, weights = lengths
        if not 0 < square < math.inf:
            return None
        h = _SHORT * min((loss or 1.0) / square, math.sqrt((weights or 1.0) / square))
        slope = self._slope(h)
        if slope is None or abs(slope - square) < _AGREE * square:
            return None if slope is None else slope / square
        shorter = self._slope(h / 4)  # checks that the step is not too long
        if shorter is None or abs(slope - shorter) > _AGREE * max(abs(slope), square):
            return None
        return slope / square

    def _slope(self, h: float) -> float | None:
        there, back = self._loss(h), self._loss(-h)
        return None if there is None or back is None else (there - back) / (2 * h)

    @torch.no_grad()
    def _loss(self, h: float) -> float | None:
        """Return the loss after h gradients; None if the loss changes the weights itself."""
        try:
            for p, here, g in self._moved:
                p.copy_(here + h * g)
            loss = self._repeated.of(self._batch)
            is_kept = all(torch.equal(p, here + h * g) for p, here, g in self._moved)
            return loss if is_kept else None
        finally:
            for p, here, _ in self._moved:
                p.copy_(here)
