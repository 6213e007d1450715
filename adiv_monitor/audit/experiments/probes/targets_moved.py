"""Do targets for pixels fit their images better if they are transposed or flipped?"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.changed_inputs import given_inputs
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

BATCHES, IMAGES = 16, 32  # most batches, and fewest images in them
MOVES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "transposed": lambda y: y.mT,
        "rows-reversed": lambda y: y.flip(1),
        "columns-reversed": lambda y: y.flip(2),
        "upside-down": lambda y: y.flip(1, 2),
        "left": lambda y: y.rot90(1, (1, 2)),
        "right": lambda y: y.rot90(-1, (1, 2)),
    }
)


@asks("targets-moved")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the correlation of images and targets as they are, and as they fit best.

    It is that of a channel, or of the channels' mean, with the targets, both less their mean at
    each pixel, so that what all images have in common does not count.
    """
    fork = setup.fork()
    images: list[Tensor] = []
    targets: list[Tensor] = []
    for batch in setup.batches[:BATCHES]:
        inputs = [x for x in given_inputs(fork, batch).values() if x.ndim == 4]
        if len(inputs) != 1 or not inputs[0].is_floating_point():
            return ()
        x = inputs[0].float().cpu()
        found = [
            y.reshape(len(y), *y.shape[-2:]).float().cpu()
            for y in list(tensors(batch))[1:]
            if y.shape[-2:] == x.shape[-2:] and y.numel() == x[:, 0].numel() and len(y) == len(x)
        ]
        if len(found) != 1:
            return ()
        images.append(torch.cat([x, x.mean(1, keepdim=True)], 1))
        targets.append(found[0])
    if len({x.shape[1:] for x in images}) != 1 or sum(map(len, images)) < IMAGES:
        return ()
    x, y = torch.cat(images), torch.cat(targets)
    is_square = y.shape[1] == y.shape[2]
    moves = {n: move for n, move in MOVES.items() if is_square or move(y[:1]).shape == y[:1].shape}
    scores = {name: _correlation(x, move(y)) for name, move in moves.items()}
    best = max(scores, key=lambda name: scores[name])
    numbers = {"own": _correlation(x, y), "best": scores[best]}
    return (Fact("", numbers, {"move": best}),)


def _correlation(images: Tensor, targets: Tensor) -> float:
    """Return the largest correlation, over channels, of images (N, C, H, W) and targets."""
    x, y = images - images.mean(0), (targets - targets.mean(0))[:, None]
    products = (x * y).sum((0, 2, 3))
    lengths = (x.square().sum((0, 2, 3)) * y.square().sum()).sqrt()
    return float((products / lengths.clamp(min=1e-30)).abs().max())
