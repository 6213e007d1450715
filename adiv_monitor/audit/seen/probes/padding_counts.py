"""Do places that only fill sequences up to one length count in the loss?"""

from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

# Padding is the same value at the end (or the beginning) of rows, nowhere else, of different
# lengths, at two places or more in this share of the rows.
ROWS = 0.25
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
           "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the share of padding in the places with a gradient of the loss.

    Places are compared by the model's outputs: a mask, weights or an `ignore_index` that leave
    padding out leave no gradient there. Padding whose targets differ may be meant to count.
    """
    fork = setup.fork()
    pairs: list[tuple[list[Tensor], list[Tensor]]] = []
    targets: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = [x for x in tensors(output) if x.is_floating_point() and x.requires_grad]
        for x in made:
            x.retain_grad()
        pairs.append(([x.detach() for x in tensors((args, kwargs))], made))

    def look(call: Call) -> None:
        target = call.argument(1, "target") if call.name in _LOSSES else None
        if isinstance(target, Tensor):
            targets.append(target.detach())

    fork.model.register_forward_hook(note, with_kwargs=True)
    with torch.enable_grad():
        loss = see_calls(fork, look)
        if not targets or not any(padding(x) is not None for given, _ in pairs for x in given):
            return Probed()
        loss.backward()  # type: ignore[no-untyped-call]
    for given, made in pairs:
        for x in given:
            filled = padding(x)
            share = 0.0 if filled is None else _share(filled, made, targets)
            if filled is not None and share > 0:
                numbers = {"share": share, "padding": float(filled.float().mean())}
                return Probed((Fact("", numbers, {"shape": str(tuple(x.shape))}),))
    return Probed()


def padding(x: Tensor) -> Tensor | None:
    """Return which places of tokens (B, T), or of vectors (B, T, F), are padding; None: none are.

    Tokens of padding are those of most rows' last, or first, place; vectors are zero.
    """
    if x.ndim not in (2, 3) or x.is_complex() or x.dtype == torch.bool or min(x.shape) < 2:
        return None
    if x.ndim == 3:
        candidates = [(x == 0).all(-1)]
    elif not x.is_floating_point() and int(x.max()) > 1:  # up to 1: a mask
        candidates = [x == x[:, end].mode().values for end in (-1, 0)]
    else:
        return None
    for filled in candidates:
        counts = filled.sum(1)
        for way in (filled, filled.flip(1)):
            at_the_end = bool((way[:, 1:] >= way[:, :-1]).all())
            long = float((counts >= 2).float().mean()) >= ROWS
            if at_the_end and long and len(counts.unique()) > 1:
                return filled
    return None


def _share(filled: Tensor, made: list[Tensor], targets: list[Tensor]) -> float:
    """Return the share of padding in the places with a gradient; 0 if most padding has none."""
    size, length = filled.shape
    known = [
        y.reshape(size, length, -1)[filled] for y in targets if y.numel() % filled.numel() == 0
    ]
    if not any(len(y) and bool((y == y[0]).all()) for y in known):
        return 0.0
    for x in made:
        gradient = x.grad
        if gradient is None:
            continue
        if gradient.ndim == 3 and gradient.shape[::2] == (size, length):
            gradient = gradient.mT
        if gradient.shape[:2] == (size, length) or gradient.shape[:1] == (size * length,):
            counts = gradient.reshape(size, length, -1).ne(0).any(-1)
            of_padding = float(counts[filled].float().mean())
            return float((counts & filled).sum() / counts.sum()) if of_padding > 0.5 else 0.0
    return 0.0
