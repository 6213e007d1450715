"""Do the similarities of samples with themselves count in a contrastive loss?"""

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

FEWEST = 4  # samples
_ROUNDING = 1e-4


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return where the diagonal of similarities has a gradient, and its share of it.

    Similarities are a symmetric matrix, of the samples or of several views of them, that the loss
    depends on up to a constant, as a softmax does: the gradient sums to zero.
    """
    fork = setup.fork()
    size = size_of(fork.batches[0])
    found: list[tuple[Call, list[Tensor]]] = []

    def look(call: Call) -> None:
        if not call.path and _is_symmetric(call.result, size):
            gradients: list[Tensor] = []
            call.result.register_hook(gradients.append)
            found.append((call, gradients))

    with torch.enable_grad():
        see_calls(fork, look).backward()  # type: ignore[no-untyped-call]
    for call, gradients in found:
        for g in gradients:
            own, every = g.diagonal().abs().sum(), g.abs().sum()
            if float(g.sum().abs()) < _ROUNDING * float(every) < float(own):
                side = "positive" if float(g.diagonal().sum()) < 0 else "negative"
                numbers = {"share": float(own / every), "samples": float(len(g))}
                return Probed((Fact(call.place, numbers, {"side": side}),))
    return Probed()


def _is_symmetric(made: object, size: int) -> bool:
    if not isinstance(made, Tensor) or not made.requires_grad or made.ndim != 2:
        return False
    count = len(made)
    if count < FEWEST or made.shape[1] != count or count % size:
        return False
    return torch.allclose(made, made.T, rtol=_ROUNDING) and bool((made != made[0, 0]).any())
