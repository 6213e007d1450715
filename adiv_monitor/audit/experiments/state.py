"""Questions about parameters, the optimizer and its steps."""

import math
import operator
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.audit.experiments.calls import Call
from adiv_monitor.audit.experiments.concerned import with_tensor
from adiv_monitor.audit.experiments.questions import Untold, asks, looks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.audit.training.train import held, train
from adiv_monitor.diagnosis.record import Fact


@looks("rate-zero")
class RateZero:
    """Tells groups of learning rate zero whose parameters get a gradient, without warm-ups."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork

    def see(self, call: Call) -> None:
        """Nothing to see: gradients tell."""

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return one fact for each group."""
        names = {id(p): name for name, p in self._fork.model.named_parameters()}
        whole = sum(p.numel() for p in self._fork.model.parameters())
        for i, group in enumerate(self._fork.optimizer.param_groups):
            reached = [p for p in group["params"] if p.grad is not None and bool(p.grad.any())]
            if float(group.get("lr", math.nan)) == 0 and reached:
                share = sum(p.numel() for p in reached) / whole
                initial = float(group.get("initial_lr", 0.0))
                numbers = {"group": float(i), "share": share, "initial_lr": initial}
                yield Fact(names.get(id(reached[0]), ""), numbers)


USUAL = 1e-8  # Adam's default epsilon; no smaller one is a fault
FEWEST = 5  # steps after which the mean of the squared gradients counts
# Names under which optimizers keep what they divide by the root of: Adam and its kin, RMSprop,
# Adagrad.
SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")


@asks("epsilon-dominates")
def epsilon_dominates(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of the entries with a gradient whose √v̂ is below the optimizer's ε.

    The step is m̂ / (√v̂ + ε) times the learning rate. v̂ is the running mean of the squared
    gradients at the end of the run; Adam corrects it for its bias (Kingma and Ba 2015, algorithm
    1), RMSprop does not, and Adagrad uses their sum.
    """
    given = [group.get("eps") for group in trained.optimizer.param_groups]
    if not any(isinstance(eps, float) and eps > USUAL for eps in given):
        return
    found = [(eps, root[root > 0]) for eps, root in _roots(trained.optimizer)]
    smaller = [(int((root < eps).sum()), eps) for eps, root in found if eps > USUAL]
    if any(count for count, _ in smaller):
        share = sum(count for count, _ in smaller) / sum(root.numel() for _, root in found)
        root = median(float(root.median()) for _, root in found if root.numel())
        yield Fact("", {"share": share, "epsilon": max(smaller)[1], "root": root})


def _roots(optimizer: Optimizer) -> Iterator[tuple[float, Tensor]]:
    """Yield ε and √v̂ of each parameter that has taken enough steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            squares = next((state[name] for name in SQUARES if name in state), None)
            steps = float(state.get("step", 0))
            if "acc_delta" in state or "eps" not in group or steps < FEWEST:
                continue  # Adadelta adds ε under the root
            if isinstance(squares, Tensor):
                grown = 1.0 - group["betas"][1] ** steps if "betas" in group else 1.0
                yield float(group["eps"]), (squares.detach() / grown).sqrt()


STEPS = 3  # only the last one counts: Adam's first step has full length
COARSE = (torch.bfloat16, torch.float16)


@asks("rounded-away")
def rounded_away(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of entries with a gradient that a step leaves exactly unchanged."""
    fork = setup.fork()
    coarse = [p for p in held(fork.optimizer) if p.dtype in COARSE]
    if not coarse:
        return
    *first, last = fork.batches[:STEPS]
    for batches in (first, [last]):
        before = [p.detach().clone() for p in coarse]
        fork.batches = batches
        train(fork)
    found = [(p.grad.to_dense() != 0, p == old)
             for p, old in zip(coarse, before, strict=True) if p.grad is not None]  # fmt: skip
    if entries := sum(int(has.sum()) for has, _ in found):
        share = sum(int((has & stays).sum()) for has, stays in found) / entries
        words = {"dtype": str(coarse[0].dtype).removeprefix("torch.")}
        yield Fact("", {"share": share}, words)


FURTHER = 64.0  # times as far as the run went, by doublings
PACE = 0.5  # of the run's own decrease by distance, at least, in each doubling
WIDE = 1e4  # times the weights of the samples, and minus that: a distance is not linear so far
LINEAR = 1e-3  # largest share of a linear change by which the two may differ


@asks("unbounded-loss")
def unbounded_loss(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Compute the first batch's loss further along the line from the first to the last weights.

    A loss with a minimum rises there, or falls more slowly. One without a lower bound falls by at
    least `PACE` times as much per distance as in the run. The fact says whether samples have
    negative weights, as the rewards of a policy gradient are.
    """
    if trained.optimizer._optimizer_step_post_hooks:
        raise Untold("a hook behind the step may keep the weights within bounds")
    fork, batch = setup.fork(), setup.batches[0]
    loss, begin = RepeatedLoss(fork), [p.detach().clone() for p in fork.model.parameters()]

    @torch.no_grad()
    def at(distance: float) -> float:
        models = fork.model.parameters(), begin, trained.model.parameters()
        for p, first, last in zip(*models, strict=True):
            p.copy_(first + distance * (last - first))
        return loss.of(batch)

    first, last = at(0.0), at(1.0)
    if not last < min(0.0, first):
        return
    before, distance = last, 1.0
    while distance < FURTHER:
        value = at(2 * distance)
        if not before - value >= PACE * (first - last) * distance:  # or it is NaN
            return
        if math.isinf(value):
            break
        before, distance = value, 2 * distance
    at(0.0)
    negative = _negative_weights(loss, batch)
    yield Fact("", {"loss": before, "times": distance, "negative": negative})


def _negative_weights(loss: RepeatedLoss, batch: Any) -> int:
    """Return the number of samples with a negative weight, in which the loss is linear."""
    for number, x in enumerate(tensors(batch)):
        if x.is_floating_point() and x.numel() == size_of(batch) and bool((x < 0).any()):
            times = [partial(operator.mul, factor) for factor in (-WIDE, 0.0, WIDE)]
            below, none, above = (loss.of(with_tensor(batch, number, scaled)) for scaled in times)
            if abs(above + below - 2 * none) < LINEAR * abs(above - none):
                return int((x < 0).sum())
    return 0
