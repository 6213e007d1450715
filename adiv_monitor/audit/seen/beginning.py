"""The state at the beginning of training: the weights, and the loss of a constant prediction."""

import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import WeightStatistics

_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_BATCHES = 4  # number of batches for the loss of a constant prediction


def weights(setup: Setup) -> dict[str, WeightStatistics]:
    """Return statistics of the initial weights of linear and convolutional layers, by path."""
    fork = setup.fork()
    normalised = _normalised(fork, setup)
    return {
        path: _statistics(module, path in normalised)
        for path, module in fork.model.named_modules()
        if isinstance(module, _MAPS) and module.weight.numel()
    }


def _normalised(fork: Fork, setup: Setup) -> frozenset[str]:
    """Return layers whose outputs go directly into a normalisation, which removes their scale."""
    paths = {module: path for path, module in fork.model.named_modules()}
    made: dict[int, tuple[Tensor, str]] = {}  # tensors are held so that their ids stay unique
    found: set[str] = set()

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made[id(output)] = output, paths[module]

    def look(module: nn.Module, inputs: Any) -> None:
        found.update(made[id(x)][1] for x in inputs[:1] if id(x) in made)

    for module in paths:
        if isinstance(module, _MAPS):
            module.register_forward_hook(note)
        elif isinstance(module, _NORMS):
            module.register_forward_pre_hook(look)
    with seeded(setup.seed), torch.no_grad():
        try:
            fork.loss(fork.model, copied(setup.batches[0]))
        except Exception:  # the training run reports errors of the loss
            return frozenset()
    return frozenset(found)


@torch.no_grad()
def _statistics(module: nn.Module, normalised: bool) -> WeightStatistics:
    weight: Any = module.weight
    bias: Any = module.bias
    rows = weight.detach().flatten(1).double()
    distinct = len(torch.unique(rows, dim=0))
    gain = float(rows.square().mean().sqrt()) * math.sqrt(rows.shape[1])
    rms = 0.0 if bias is None else float(bias.detach().double().square().mean().sqrt())
    alike = (len(rows) - distinct) / (len(rows) - 1) if len(rows) > 1 else 0.0
    return WeightStatistics(gain, rms, alike, normalised)


def chance(setup: Setup) -> float | None:
    """Return the loss with the last layer's outputs replaced by zeros; None if it is unknown.

    It is log(classes) for cross-entropy, and the mean square of the targets for squared errors. The
    last layer is the linear or convolutional one that runs last.
    """
    fork = setup.fork()
    last: list[nn.Module] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        last[:] = [module]

    def zero(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    maps = [module for module in fork.model.modules() if isinstance(module, _MAPS)]
    handles = [module.register_forward_hook(note) for module in maps]
    batches = setup.batches[:_BATCHES]
    with seeded(setup.seed), torch.no_grad():
        try:
            fork.loss(fork.model, copied(batches[0]))
            for handle in handles:
                handle.remove()
            if not last:
                return None
            last[0].register_forward_hook(zero)
            losses = [float(fork.loss(fork.model, copied(batch))) for batch in batches]
        except Exception:  # the training run reports errors of the loss
            return None
    return fmean(losses) if all(map(math.isfinite, losses)) else None


def double_softmax(setup: Setup) -> bool | None:
    """Return whether the outputs are probabilities and the loss takes another softmax of them.

    Outputs are probabilities if no entry is negative and they sum to 1 over the last dimension or
    the second. The loss takes a softmax if its value stays the same when 1 is added to all outputs.
    None: the model's output is no tensor of several classes, or can't be changed.
    """
    fork = setup.fork()
    seen: list[bool] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim >= 2 and output.shape[1] > 1:
            sums = (output.sum(1), output.sum(-1))
            ones = any(bool((total - 1).abs().max() < 1e-3) for total in sums)
            seen.append(ones and bool(output.min() >= 0))

    def shift(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 1

    fork.model.register_forward_hook(look)
    with torch.no_grad():
        try:
            with seeded(setup.seed):
                loss = float(fork.loss(fork.model, copied(setup.batches[0])))
            if not seen:
                return None
            fork = setup.fork()
            fork.model.register_forward_hook(shift)
            with seeded(setup.seed):
                shifted = float(fork.loss(fork.model, copied(setup.batches[0])))
        except Exception:  # the training run reports errors of the loss
            return None
    return all(seen) and math.isclose(loss, shifted, rel_tol=1e-5)
