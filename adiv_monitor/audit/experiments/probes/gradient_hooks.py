"""Do hooks change the gradient between the backward pass and the optimizer's step?"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.hooks import without_gradient_hooks
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact


@asks("gradient-hooks")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Compare the gradient that reaches the optimizer with hooks and without any."""
    bare = setup.fork()
    if not without_gradient_hooks(bare.model, bare.optimizer):
        return ()
    plain = _gradients(bare)
    used = _gradients(setup.fork())
    dots = [0.0, 0.0, 0.0]
    for g, h in zip(plain, used, strict=True):
        for i, (a, b) in enumerate(((g, g), (h, h), (g, h))):
            dots[i] += float((a.double() * b.double()).sum())
    own, changed, between = dots
    if not own > 0:
        raise Untold("the gradient is zero without hooks, too")
    if not math.isfinite(changed):
        raise Untold("the gradient is not finite")
    cosine = between / math.sqrt(own * changed) if changed > 0 else 0.0
    return (Fact("", {"ratio": math.sqrt(changed / own), "cosine": cosine}),)


def _gradients(fork: Fork) -> list[Tensor]:
    """Return the gradients that reach the optimizer from the first batch; zeros: none."""
    with seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(fork.batches[0])).backward()  # type: ignore[no-untyped-call]
        for hook in fork.optimizer._optimizer_step_pre_hooks.values():
            hook(fork.optimizer, (), {})
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in held(fork.optimizer)]  # fmt: skip
