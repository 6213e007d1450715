"""Are the targets of a sequence its own tokens, or visible to the model as later inputs?"""

from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.seen.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import mapped, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

_ALIKE = 0.99  # share of the targets without padding and ends
_SAME = 1e-5  # share of the outputs' length: rounding


def target_is_input(setup: Setup, trained: Fork) -> Probed:
    """Find integer targets equal to the inputs, in a model that does not look ahead.

    The first target must affect the loss: it does not in a model that shifts the labels itself.
    """
    batch = setup.batches[0]
    found = _tokens(batch)
    if found is None or found[2] != 0:
        return Probed()
    tokens, labels, _ = found
    fork = setup.fork()
    ahead = looks_ahead(fork, batch, tokens)
    if ahead is None:
        return Probed(untold="no output has the places of the inputs")
    if ahead > _SAME:  # an autoencoder may reproduce its inputs on purpose
        return Probed()
    again = RepeatedLoss(fork)
    as_it_is = again.of(batch)
    other = _with(batch, labels, lambda x: _first_changed(x, tokens))
    counts = abs(again.of(other) - as_it_is) > 1e-6 * abs(as_it_is)
    return Probed((Fact("", {"share": 1.0}),) if counts else ())


def future_leak(setup: Setup, trained: Fork) -> Probed:
    """Find targets that are the next tokens, in a model whose outputs depend on later inputs."""
    batch = setup.batches[0]
    found = _tokens(batch)
    if found is None:
        return Probed()
    tokens, labels, moved = found
    fork = setup.fork()
    if moved == 0:  # the model itself may shift the labels; then the first one does not count
        again = RepeatedLoss(fork)
        other = _with(batch, labels, lambda x: _first_changed(x, tokens))
        if labels is tokens or again.of(other) != again.of(batch):
            return Probed()
    ahead = looks_ahead(fork, batch, tokens)
    if ahead is None:
        return Probed(untold="no output has the places of the inputs")
    return Probed((Fact("", {"change": ahead}),) if ahead > _SAME else ())


def _tokens(batch: Any) -> tuple[Tensor, Tensor, int] | None:
    """Return tokens, labels and the shift of the labels (0 or 1); None: not found."""
    whole = [x for x in tensors(batch) if x.ndim == 2 and x.shape[1] > 2 and _is_integer(x)]
    for i, tokens in enumerate(whole):
        if int(tokens.max()) <= 1:
            continue  # the tensor is a mask
        for labels in whole[i + 1 :]:
            if labels.shape != tokens.shape:
                continue
            if _share(labels[:, :-1], tokens[:, 1:]) >= _ALIKE:
                return tokens, labels, 1
            if _share(labels, tokens) >= _ALIKE:
                return tokens, labels, 0
    return None


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _share(labels: Tensor, tokens: Tensor) -> float:
    """Return the share of the labels that equal the tokens; labels to ignore do not count."""
    real = labels >= 0
    return float((labels == tokens)[real].float().mean()) if bool(real.any()) else 0.0


def looks_ahead(fork: Fork, batch: Any, tokens: Tensor) -> float | None:
    """Return how far outputs of the first half change if tokens of the second half change.

    The change is relative to their length; None if no output has the positions of the tokens.
    """
    half = tokens.shape[1] // 2
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        fitting = [x for x in tensors(output) if x.is_floating_point() and x.ndim >= 3
                   and x.shape[:2] == tokens.shape]  # fmt: skip
        seen.extend(x.detach()[:, :half].clone() for x in fitting[:1])

    def other(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[:, half:] = x[:, half:].roll(1, 0) if len(x) > 1 else x[:, half:].flip(1)
        return changed

    handle = fork.model.register_forward_hook(note)
    try:
        RepeatedLoss(fork).of(batch)
        RepeatedLoss(fork).of(_with(batch, tokens, other))
    finally:
        handle.remove()
    if len(seen) != 2 or not bool(seen[0].any()):
        return None
    return float((seen[0] - seen[1]).norm() / seen[0].norm())


def _first_changed(labels: Tensor, tokens: Tensor) -> Tensor:
    """Return the batch with other first labels."""
    changed = labels.clone()
    changed[:, 0] = torch.where(labels[:, 0] == tokens.max(), tokens.min(), tokens.max())
    return changed


def _with(batch: Any, one: Tensor, change: Any) -> Any:
    """Return the batch with one of its tensors replaced."""
    return mapped(batch, lambda x: change(x) if x is one else x)
