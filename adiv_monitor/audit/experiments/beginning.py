"""The state at the beginning of training: the weights, and the loss of a constant prediction."""

import math
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.training.batches import copied, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import WeightStatistics

_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Functions that multiply by a weight, and the place of the weight among their arguments.
_RIGHT = {"linear": 1, "matmul": 1, "__matmul__": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
_COUNTED = 10  # batches that batch normalisations may have counted before training, as in a test
_BATCHES = 4  # number of batches for the loss of a constant prediction


def weights(setup: Setup) -> dict[str, WeightStatistics]:
    """Return statistics of the initial weights of linear maps, by path.

    These are linear layers, convolutions, and parameters that no such layer holds but that inputs
    are multiplied by, under the parameter's name.
    """
    fork = setup.fork()
    last, normalised = _places(fork)
    found = {}
    for path, module in fork.model.named_modules():
        if isinstance(module, _MAPS) and module.weight.numel():
            weight = module.weight.detach()
            fan_out = len(weight) * weight[0, 0].numel()
            found[path] = _statistics(
                weight.flatten(1), module.bias, fan_out, normalised=path in normalised,
                last=path in last,
            )  # fmt: skip
    for name, rows in bare_weights(setup.fork()).items():
        found[name] = _statistics(rows, None, rows.shape[-2], bare=True)
    return found


@torch.no_grad()
def bare_weights(fork: Fork) -> dict[str, Tensor]:
    """Return parameters by which a pass multiplies on the right and that no layer holds.

    Each is viewed as (…, outputs, inputs), by its name, in the order of the products.
    """
    owned = {id(m.weight) for m in fork.model.modules() if isinstance(m, _MAPS)}
    names = {id(p): name for name, p in fork.model.named_parameters() if id(p) not in owned}
    found: dict[str, Tensor] = {}

    def look(call: Call) -> None:
        place = _RIGHT.get(call.name, len(call.args))
        for weight in call.args[place : place + 1]:
            name = names.get(id(weight))
            if name and weight.ndim >= 2 and weight.numel() and weight.requires_grad:
                found[name] = weight if call.name == "linear" else weight.mT

    see_calls(fork, look)
    return found


def last_maps(fork: Fork) -> list[str]:
    """Return the paths of the last linear and convolutional layers, whose outputs no other takes.

    Those outputs reach the loss. Empty: no such layer runs, or its outputs can't be marked.
    """
    return _places(fork)[0]


def _places(fork: Fork) -> tuple[list[str], set[str]]:
    """Return the paths of the last maps, and of those directly before a normalisation.

    The last ones are those whose outputs reach the loss and no other map: several if a model has
    several heads. It is the one that runs last if each one's outputs reach another, as where
    outputs are fed back, and if the graph does not show it. A normalisation removes the scale of
    its inputs.
    """
    made: dict[int, tuple[str, Tensor, Any]] = {}  # tensors are held so that their ids stay unique
    given: list[Any] = []
    normalised: set[str] = set()

    def look(module: nn.Module, inputs: Any) -> None:
        given.extend(x.grad_fn for x in tensors(inputs))

    def mark(path: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        marked = output.requires_grad_().clone()  # a frozen map's outputs have no node
        made[id(marked)] = path, marked, marked.grad_fn
        return marked

    def look_of_norm(module: nn.Module, inputs: Any) -> None:
        normalised.update(made[id(x)][0] for x in inputs[:1] if id(x) in made)

    for path, module in fork.model.named_modules():
        if isinstance(module, _MAPS):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(partial(mark, path))
        elif isinstance(module, _NORMS):
            module.register_forward_pre_hook(look_of_norm)
    try:
        with torch.enable_grad():
            reached = nodes_of([fork.first_loss().grad_fn])
    except Exception:  # as in functions that torch.func transforms
        return [], set()
    read = nodes_of(given)
    ran = [path for path, _, _ in made.values()]
    before = {path for path, _, node in made.values() if node in read}
    last = {path for path, _, node in made.values() if node in reached} - before
    return sorted(last) or ran[-1:], normalised


@torch.no_grad()
def _statistics(
    weight: Tensor, bias: Tensor | None, fan_out: int, **where: bool
) -> WeightStatistics:
    """Return the statistics of a weight (…, outputs, inputs)."""
    rows = weight.flatten(0, -2).double()
    rms, width = float(rows.square().mean().sqrt()), math.sqrt(rows.shape[1])
    distinct = len(torch.unique(rows, dim=0))
    return WeightStatistics(
        gain=rms * width,
        bias=0.0 if bias is None else float(bias.double().square().mean().sqrt()),
        alike=(len(rows) - distinct) / max(len(rows) - 1, 1),
        rms=rms,
        gradient_gain=rms * math.sqrt(fan_out),
        largest=float(rows.abs().max()) * width,
        **where,
    )


def are_trained(setup: Setup) -> bool:
    """Return whether weights were trained or loaded: the state in which training begins tells.

    The optimizer has a state, or batch normalisations have counted batches, or the gains and
    offsets of most normalisations, which begin constant, spread around a mean.
    """
    if getattr(setup.optimizer, "state", None):
        return True
    norms = [module for module in setup.model.modules() if isinstance(module, _NORMS)]
    counts = [int(n) for m in norms if (n := getattr(m, "num_batches_tracked", None)) is not None]
    gains = [m for m in norms if m.weight is not None and m.weight.numel() > 1]
    moved = [m for m in gains if _spreads(m.weight, 3.0) and _spreads(getattr(m, "bias", None))]
    return max(counts, default=0) > _COUNTED or len(moved) > len(gains) / 2


def _spreads(values: Tensor | None, within: float = 0.0) -> bool:
    """Return whether values differ, and their mean is this many standard deviations from 0."""
    if values is None:
        return True
    spread, mean = float(values.detach().std()), float(values.detach().mean())
    return spread > 0 and abs(mean) > within * spread


def chance(setup: Setup) -> float | None:
    """Return the loss with the last layers' outputs replaced by zeros; None if it is unknown.

    It is log(classes) for cross-entropy, and the mean square of the targets for squared errors. The
    last layers are the linear and convolutional ones whose outputs no other one takes. It is
    unknown if the outputs then differ between samples: a residual model returns its inputs.
    """
    plain, fork = setup.fork(), setup.fork()
    own, without = _outputs(plain.model), _outputs(fork.model)
    last = last_maps(plain)
    for path in last:
        fork.model.get_submodule(path).register_forward_hook(lambda m, x, y: torch.zeros_like(y))
    try:
        with seeded(setup.seed), torch.no_grad():
            losses = [float(fork.loss(fork.model, copied(x))) for x in setup.batches[:_BATCHES]]
    except Exception:  # not every loss takes zeros
        return None
    # Outputs that the last layers do not change are no predictions, such as a code beside them.
    made = [y for x, y in zip(own, without, strict=False) if y.ndim and not torch.equal(x, y)]
    is_constant = all(torch.allclose(y, y[:1].expand_as(y), equal_nan=True) for y in made)
    return fmean(losses) if last and is_constant and all(map(math.isfinite, losses)) else None


def _outputs(model: nn.Module) -> list[Tensor]:
    """Return the list of what the model returns from now on."""
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.extend(x.detach().clone() for x in tensors(output))

    model.register_forward_hook(note)
    return seen
