"""Is the learning rate of parameters that have a gradient zero?"""

import math
from collections.abc import Iterable

import torch

from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact


@asks("rate-zero")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return groups of learning rate zero whose parameters get a gradient, without warm-ups."""
    fork = setup.fork()
    with seeded(fork.seed), torch.enable_grad():
        fork.loss(fork.model, copied(fork.batches[0])).backward()  # type: ignore[no-untyped-call]
    groups = fork.optimizer.param_groups
    names = {id(p): name for name, p in fork.model.named_parameters()}
    facts = []
    for i, group in enumerate(groups):
        reached = [p for p in group["params"] if p.grad is not None and bool((p.grad != 0).any())]
        if float(group.get("lr", math.nan)) == 0 and reached:
            share = sum(p.numel() for p in reached) / sum(
                p.numel() for p in fork.model.parameters()
            )
            initial = float(group.get("initial_lr", 0.0))
            numbers = {"group": float(i), "share": share, "initial_lr": initial}
            facts.append(Fact(names.get(id(reached[0]), ""), numbers))
    return tuple(facts)
