"""Whether a loss is a measure: whether its targets or samples change as the network trains."""

import math
from collections.abc import Sequence
from dataclasses import replace
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
        kept: list[Tensor | None] = []
        begin, paths = setup.fork(), last_maps(setup.fork())
        _mark(begin.model, paths, kept)
        loss = begin.first_loss()
        reached = nodes_of([loss.grad_fn])
        kept = [x.detach() if x is not None and x.grad_fn in reached else None for x in kept]
        fork = after.fork()
        _put_back(fork.model, paths, kept)
        changed = fork.first_loss()
        if _same(loss, changed):
            return False
        own = {id(getattr(node, "variable", None)) for node in nodes_of([changed.grad_fn])}
        last = after.fork()
        models = (last.model, fork.model, setup.fork().model)
        for p, q, before in zip(*(model.parameters() for model in models), strict=True):
            if id(q) in own:
                p.data = before.data
        _put_back(last.model, paths, kept)
        return not _same(loss, last.first_loss())
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


def _mark(model: nn.Module, paths: Sequence[str], kept: list[Tensor | None]) -> None:
    """Keep the outputs of modules, in order; None where no gradient is taken."""

    def mark(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        marked = output.clone()
        kept.append(marked if marked.requires_grad else None)
        return marked

    for path in paths:
        model.get_submodule(path).register_forward_hook(mark)


def _put_back(model: nn.Module, paths: Sequence[str], kept: Sequence[Tensor | None]) -> None:
    """Replace outputs of modules by those that were kept, in order."""
    calls = iter(kept)

    def put(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        known = next(calls)
        return output if known is None else known.clone().requires_grad_()

    for path in paths:
        model.get_submodule(path).register_forward_hook(put)


def _same(loss: Tensor, other: Tensor) -> bool:
    """Return whether two losses are equal, or one is not finite."""
    exact = 1e-5 if loss.device.type == "cpu" else 1e-3  # other devices may choose other kernels
    one, two = float(loss.detach()), float(other.detach())
    return math.isclose(one, two, rel_tol=exact, abs_tol=1e-7) or not math.isfinite(one + two)
