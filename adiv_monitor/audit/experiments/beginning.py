"""The state in which training begins: the weights, and those that nothing uses."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import PRODUCTS, Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss
from adiv_monitor.audit.experiments.questions import looks
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact, WeightStatistics

MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Functions that multiply by a weight, and the place of the weight among their arguments.
_RIGHT = {"linear": 1, "matmul": 1, "__matmul__": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
_COUNTED = 10  # batches that batch normalisations may have counted before training, as in a test


def weights(setup: Setup) -> dict[str, WeightStatistics]:
    """Return statistics of the initial weights of linear maps, by path.

    These are linear layers, convolutions, and parameters that no such layer holds but that inputs
    are multiplied by, under the parameter's name.
    """
    last, normalised = last_maps(setup.fork())
    found = {}
    for path, module in setup.model.named_modules():  # a loss may change those of a copy
        if isinstance(module, MAPS) and module.weight.numel():
            weight = module.weight.detach()
            fan_out = len(weight) * weight[0, 0].numel()
            where = {"normalised": path in normalised, "last": path in last}
            found[path] = _statistics(weight.flatten(1), module.bias, fan_out, **where)
    for name, rows in bare_weights(setup.fork()).items():
        found[name] = _statistics(rows, None, rows.shape[-2], bare=True)
    return found


@torch.no_grad()
def bare_weights(fork: Fork) -> dict[str, Tensor]:
    """Return parameters by which a pass multiplies on the right and that no layer holds.

    Each is viewed as (…, outputs, inputs), by its name, in the order of the products.
    """
    owned = {id(m.weight) for m in fork.model.modules() if isinstance(m, MAPS)}
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


def last_maps(fork: Fork) -> tuple[list[str], set[str]]:
    """Return the paths of the last linear and convolutional layers, and of those before a norm.

    The last ones are those whose outputs reach the loss and no other map: several if a model has
    several heads. It is the one that runs last if each one's outputs reach another, as where
    outputs are fed back, and if the graph does not show it. There is none if no such layer runs, or
    its outputs can't be marked. A normalisation, directly behind, removes the scale of its inputs.
    """
    made: dict[int, tuple[str, Tensor, Any]] = {}  # tensors are held so that their ids stay unique
    given: list[Any] = []
    normalised: set[str] = set()

    def mark(path: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        marked = output.requires_grad_().clone()  # a frozen map's outputs have no node
        made[id(marked)] = path, marked, marked.grad_fn
        return marked

    def look_of_norm(module: nn.Module, inputs: Any) -> None:
        normalised.update(made[id(x)][0] for x in inputs[:1] if id(x) in made)

    for path, module in fork.model.named_modules():
        if isinstance(module, MAPS):
            module.register_forward_pre_hook(
                lambda module, inputs: given.extend(x.grad_fn for x in tensors(inputs))
            )
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
        gain=rms * width, rms=rms, gradient_gain=rms * math.sqrt(fan_out),
        bias=0.0 if bias is None else float(bias.double().square().mean().sqrt()),
        alike=(len(rows) - distinct) / max(len(rows) - 1, 1),
        largest=float(rows.abs().max()) * width, **where)  # fmt: skip


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


# Weights of nearly one sign


WEIGHTED = (*PRODUCTS, "addmm", "conv1d", "conv2d", "conv3d", "bilinear")
ENTRIES = 64  # fewest of a weight: the mean of fewer differs from zero by chance
ONE_SIDED = 0.3  # abs(mean) / rms
DEVIATIONS = 4.0  # of the mean of independent entries around zero: 1 / sqrt(their number)


@looks("one-sided-weights")
class OneSided:
    """Do weights that multiply inputs begin with nearly one sign, like those of torch.rand?"""

    def __init__(self, fork: Fork) -> None:
        self.weights: dict[str, Tensor] = {}
        self._names = {id(p): name for name, p in fork.model.named_parameters()}

    def see(self, call: Call) -> None:
        """Look for weights; complex numbers have no sign."""
        for x in call.args if call.name in WEIGHTED else ():
            name = self._names.get(id(x))
            if name is None or x.ndim < 2 or x.numel() < ENTRIES or x.is_complex():
                continue
            if x.requires_grad and share(x) > max(ONE_SIDED, DEVIATIONS / math.sqrt(x.numel())):
                self.weights[name] = x

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return abs(mean) / rms of each weight for which it is above 0.3, and not by chance."""
        return [Fact(name, {"mean": float(p.detach().mean()), "share": share(p)})
                for name, p in self.weights.items()]  # fmt: skip


def share(weight: Tensor) -> float:
    """Return abs(mean) / rms of the entries, 0 to 1."""
    x = weight.detach().double()
    rms = float(x.square().mean().sqrt())
    return abs(float(x.mean())) / rms if rms > 0 else 0.0


# Parameters on which the loss does not depend


LOOKED = 32  # most forward passes that decide on which parameters the loss depends


@torch.no_grad()
def unused(fork: Fork, batch: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, out of `names`, that the loss of a batch does not depend on at all.

    Normal noise of their own rms, but at least 0.1, is added to all of them; if the loss changes,
    to each half of them, and so on. Parameters that the limit of passes leaves undecided are not
    returned.
    """
    loss, parameters = RepeatedLoss(fork), dict(fork.model.named_parameters())
    as_it_is = loss.of(batch)
    found: set[str] = set()
    groups = [list(names)]
    for _ in range(LOOKED):
        if not groups or not groups[0]:
            break
        group = groups.pop(0)
        before = [parameters[name].clone() for name in group]
        with seeded(fork.seed):
            for name, p in zip(group, before, strict=True):
                rms = max(float(p.float().square().mean().sqrt()), 0.1)
                parameters[name].add_(rms * torch.randn_like(p))
        if math.isclose(loss.of(batch), as_it_is, rel_tol=1e-6):
            found.update(group)
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        for name, p in zip(group, before, strict=True):
            parameters[name].copy_(p)
    return tuple(name for name in names if name in found)
