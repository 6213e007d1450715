"""Does a step leave 16-bit weights unchanged because it is smaller than their last digit?"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import Watch, held, train
from adiv_monitor.diagnosis.record import Fact

STEPS = 3  # only the last one counts: Adam's first step has full length
COARSE = (torch.bfloat16, torch.float16)


@asks("rounded-away")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of entries with a gradient that a step leaves exactly unchanged."""
    fork = replace(setup, steps=min(STEPS, setup.steps)).fork()
    coarse = [p for p in held(fork.optimizer) if p.dtype in COARSE]
    if not coarse:
        return ()
    watch = _Last(coarse)
    train(fork, watch)
    if not watch.entries:
        raise Untold("no entry had a gradient")
    share = watch.equal / watch.entries
    words = {"dtype": str(coarse[0].dtype).removeprefix("torch.")}
    return (Fact("", {"share": share}, words),)


class _Last(Watch):
    """Compares the weights before and after each step, and keeps the counts of the last step."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._before: list[Tensor] = []
        self.equal = self.entries = 0

    def has_gradients(self, step: int, loss: Tensor) -> None:
        self._before = [p.detach().clone() for p in self._parameters]

    def has_stepped(self, step: int, batch: object) -> None:
        self.equal = self.entries = 0
        for p, before in zip(self._parameters, self._before, strict=True):
            if p.grad is not None:
                has = p.grad.to_dense() != 0
                self.entries += int(has.sum())
                self.equal += int(((p.detach() == before) & has).sum())
