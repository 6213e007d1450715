"""Do places that only fill sequences up to one length count in the loss?"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

# Padding is the same value at the end (or the beginning) of rows, nowhere else, at two places or
# more in this share of the rows. Its lengths differ, or it fills more than half of every row.
ROWS = 0.25
MOST = 0.5
# Share of the padding that has a gradient: where the loss leaves padding out, it is 0.
COUNTS = 0.5
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
           "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip


class Padding(NamedTuple):
    """The padding of rows (B, T).

    Attributes:
        places: The places that are padding.
        inside: Those beside others that are, on the side of the real places: only their targets
            are padding, too, if targets are the next, or the previous, tokens.
    """

    places: Tensor
    inside: Tensor


@asks("padding-counts")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
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
            return ()
        loss.backward()  # type: ignore[no-untyped-call]
    for given, made in pairs:
        for x in given:
            of_rows = padding(x)
            share = 0.0 if of_rows is None else _share(of_rows, made, targets)
            if share > 0:
                return (Fact("", {"share": share}, {"shape": str(tuple(x.shape))}),)
    return ()


def padding(x: Tensor) -> Padding | None:
    """Return the padding of tokens (B, T), or of vectors (B, T, F); None: there is none.

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
    for places in candidates:
        counts = places.sum(1)
        long = float((counts >= 2).float().mean()) >= ROWS
        for step in (1, -1):  # from the real places to the padding
            before = places.roll(step, 1)
            before[:, 0 if step == 1 else -1] = False
            shortest, longest = int(counts.min()), int(counts.max())
            filled = shortest < longest or MOST * x.shape[1] < longest < x.shape[1]
            if long and filled and not bool((before & ~places).any()):
                return Padding(places, places & before)
    return None


def _share(found: Padding, made: list[Tensor], targets: list[Tensor]) -> float:
    """Return the share of padding in the places with a gradient; 0 if most padding has none."""
    size, length = found.places.shape
    known = [
        y.reshape(size, length, -1)[found.inside]
        for y in targets
        if y.numel() % (size * length) == 0
    ]
    # Negative classes are ignored ones, such as the last place of labels that were shifted.
    known = [y if y.is_floating_point() else y[y >= 0] for y in known]
    if not any(len(y) and bool((y == y[0]).all()) for y in known):
        return 0.0
    for x in made:
        gradient = x.grad
        if gradient is None:
            continue
        is_placed = gradient.shape[:2] == (size, length)
        if not is_placed and gradient.ndim == 3 and gradient.shape[::2] == (size, length):
            gradient, is_placed = gradient.mT, True
        if is_placed or gradient.shape[:1] == (size * length,):
            counts = gradient.reshape(size, length, -1).ne(0).any(-1)
            of_padding = float(counts[found.inside].float().mean())
            return (
                float((counts & found.places).sum() / counts.sum()) if of_padding > COUNTS else 0.0
            )
    return 0.0
