"""Do the similarities of samples with themselves count in a contrastive loss?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

FEWEST = 4  # samples
MANY = 0.3  # of the entries: fewer are positive pairs
RISES = 0.5  # correlation; 1 for a softmax, 0 for a gradient that similarities don't change
_ROUNDING = 1e-4


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return where the diagonal of similarities has a gradient, and its share of it.

    Similarities are a symmetric matrix, of the samples or of several views of them, to whose rows
    the loss applies a softmax: the gradient of each row sums to zero, is negative only at positive
    pairs, and is larger for larger similarities elsewhere.
    """
    fork = setup.fork()
    size = size_of(fork.batches[0])
    found: list[tuple[Call, list[Tensor]]] = []

    def look(call: Call) -> None:
        if call.path is None and _is_symmetric(call.result, size):
            gradients: list[Tensor] = []
            call.result.register_hook(gradients.append)
            found.append((call, gradients))

    with torch.enable_grad():
        see_calls(fork, look).backward()  # type: ignore[no-untyped-call]
    for call, gradients in found:
        for g in gradients:
            own, every = g.diagonal().abs().sum(), g.abs().sum()
            if _is_of_softmax(g, call.result) and float(own) > _ROUNDING * float(every):
                side = "positive" if float(g.diagonal().sum()) < 0 else "negative"
                numbers = {"share": float(own / every), "samples": float(len(g))}
                return Probed((Fact(call.place, numbers, {"side": side}),))
    return Probed()


def _is_of_softmax(gradient: Tensor, similarities: Tensor) -> bool:
    sums, sizes = gradient.sum(1).abs(), gradient.abs().sum(1)
    if bool((sums > _ROUNDING * sizes).any()) or float((gradient < 0).float().mean()) >= MANY:
        return False
    is_pushed = gradient > 0
    logs = _centred(gradient.where(is_pushed, 1.0).log(), is_pushed)
    values = _centred(similarities.detach(), is_pushed)
    return float(torch.cosine_similarity(logs.flatten(), values.flatten(), dim=0)) > RISES


def _centred(x: Tensor, counts: Tensor) -> Tensor:
    """Return some entries of each row less their mean, and zeros for the others."""
    mean = (x * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    return (x - mean) * counts


def _is_symmetric(made: object, size: int) -> bool:
    if not isinstance(made, Tensor) or not made.requires_grad or made.ndim != 2:
        return False
    count = len(made)
    if count < FEWEST or made.shape[1] != count or count % size:
        return False
    return torch.allclose(made, made.T, rtol=_ROUNDING) and bool((made != made[0, 0]).any())
