"""Whether a loss is a measure: whether its targets or samples change as the network trains."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.beginning import last_maps
from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup

# Functions that draw samples with probabilities, means or rates that a network may compute.
_DRAW = ("multinomial", "bernoulli", "normal", "poisson", "binomial")


def moving_targets(setup: Setup, trained: Fork) -> bool:
    """Return whether the loss of the same outputs changes in training, or draws from the network.

    The first batch's loss is computed before and after training. The outputs that the loss learns
    from stay those before training, and so do all weights that it learns from otherwise, such as
    those of a penalty. A loss that still changes has targets that the network makes (TD targets,
    self-distillation) or that a memory holds. It is False if the loss can't be computed this way.
    """
    try:
        after = replace(setup, model=trained.model, loss=trained.loss, optimizer=_any)
        if not all(map(torch.equal, _given(setup), _given(after))):
            return True
        paths = last_maps(setup.fork())
        outputs: list[Tensor] = []
        loss = _loss(setup.fork(), paths, partial(_keep, outputs))
        reached = nodes_of([loss.grad_fn])
        kept = [x.detach() if x.requires_grad and x.grad_fn in reached else None for x in outputs]
        fork, last = after.fork(), after.fork()
        changed = _loss(fork, paths, partial(_put_back, iter(kept)))
        own = {id(getattr(node, "variable", None)) for node in nodes_of([changed.grad_fn])}
        models = (last.model, fork.model, setup.model)
        for p, q, before in zip(*(model.parameters() for model in models), strict=True):
            if id(q) in own:
                p.data = before.detach().clone()
        others = _loss(last, paths, partial(_put_back, iter(kept)))
        return not same(loss, changed) and not same(loss, others)
    except Exception:  # a loss that differentiates, or weights that are not finite
        return False


def _any(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def _given(setup: Setup) -> list[Tensor]:
    """Return what functions that draw samples are given in the first batch's loss."""
    found: list[Tensor] = []

    def look(call: Call) -> None:
        if call.name in _DRAW:
            given = tensors((call.args, dict(call.kwargs)))
            found.extend(x.detach().clone() for x in given if x is not call.result)

    with torch.enable_grad():
        see_calls(setup.fork(), look)
    return found


def _loss(fork: Fork, paths: Sequence[str], change: Any) -> Tensor:
    """Return the first loss with the outputs of some modules changed, in order."""
    for path in paths:
        fork.model.get_submodule(path).register_forward_hook(change)
    return fork.first_loss()


def _keep(kept: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    kept.append(output.clone())
    return kept[-1]


def _put_back(kept: Any, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    known = next(kept)
    return output if known is None else known.clone().requires_grad_()


def same(loss: Tensor, other: Tensor | float) -> bool:
    """Return whether two losses are equal up to the order of sums, or one is not finite."""
    exact = 1e-5 if loss.device.type == "cpu" else 1e-3  # other devices may choose other kernels
    one, two = float(loss.detach()), float(torch.as_tensor(other).detach())
    return math.isclose(one, two, rel_tol=exact, abs_tol=1e-7) or not math.isfinite(one + two)
