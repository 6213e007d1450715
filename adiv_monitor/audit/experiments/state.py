"""Questions about parameters as they begin, and of steps."""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, given, see_calls
from adiv_monitor.audit.experiments.changed_inputs import RepeatedLoss, with_tensor
from adiv_monitor.audit.experiments.questions import asks, looks
from adiv_monitor.audit.training.batches import size_of, tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.capture.selection import unregistered
from adiv_monitor.diagnosis.record import Fact, WeightStatistics
from adiv_monitor.rerun.eager import forced_eager

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


# Parameters that are not registered


@looks("hidden-parameters")
class Hidden:
    """Does the forward pass use parameters that the model does not register?

    They stay in an attribute of a module that torch does not search, or each pass makes them anew.
    Does the loss, if it is a module, have parameters of its own that the optimizer does not hold?
    """

    def __init__(self, fork: Fork) -> None:
        known = {id(p) for p in (*fork.model.parameters(), *held(fork.optimizer))}
        self._count = sum(p.numel() for p in fork.model.parameters())
        self._inside = {k: x for k, x in unregistered(fork.model).items() if k not in known}
        self._known = known | self._inside.keys()
        loss = getattr(fork.loss, "function", fork.loss)  # that of a TargetLoss
        own = loss.named_parameters(recurse=False) if isinstance(loss, nn.Module) else ()
        self._of_loss = {id(p): Fact(name, {}, {"of": "loss"}) for name, p in own}
        self._anew: list[Fact] = []

    def see(self, call: Call) -> None:
        """Look for parameters that the model did not have before the pass."""
        is_used = call.path is not None and any(x.grad_fn for x in tensors(call.result))
        for x in given(call) if is_used else ():
            if isinstance(x, nn.Parameter) and id(x) not in self._known:
                share = x.numel() / (self._count + x.numel())
                self._anew.append(Fact(call.place, {"share": share}, {"made": "anew"}))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return leaves that get a gradient, and the places where a new parameter is used."""
        reached = {id(getattr(node, "variable", None)) for node in nodes_of([loss.grad_fn])}
        found = [known for key, known in self._inside.items() if key in reached]
        every = self._count + sum(x.numel() for _, x in found)
        own = [fact for key, fact in self._of_loss.items() if key in reached - self._known]
        return (*(Fact(name, {"share": x.numel() / every}) for name, x in found), *self._anew, *own)


# The cost of a step


# Of a usual machine, in a second, rounded: multiplications and additions of one core of a server's
# processor, whose time to read and write tensors is in them, and of a GPU; and calls of operators.
CPU_FLOPS, GPU_FLOPS, CALLS = 4e10, 6e12, 1e5
UPDATE = 12  # calls of operators by which an optimizer updates a parameter, as Adam does


def counted(setup: Setup) -> tuple[float, bool]:
    """Return what a training step costs, and whether the loss fails without gradients.

    The cost is in seconds on a usual machine, flops / speed + calls / speed, counted in one forward
    pass of a copy. A backward pass is taken for two of them, and a step of the optimizer for
    `UPDATE` calls per parameter. If operators can't be counted, it is 6 multiplications and
    additions per parameter and sample.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if that is there

    parameters = list(setup.model.parameters())
    speed = CPU_FLOPS if parameters[0].device.type == "cpu" else GPU_FLOPS
    differentiates = False
    for with_gradients in (False, True):
        try:
            with (
                forced_eager(),
                torch.set_grad_enabled(with_gradients),
                FlopCounterMode(display=False) as flops,
                _Calls() as calls,  # type: ignore[no-untyped-call]
            ):
                setup.fork().first_loss()
        except Exception as error:  # or an operator that a dispatch mode can't handle
            if with_gradients or "does not require grad" not in str(error):
                break  # training says what else is wrong
            differentiates = True
        else:
            updates = UPDATE * len(parameters)
            cost = 3.0 * flops.get_total_flops() / speed + (3.0 * calls.number + updates) / CALLS
            return cost, differentiates
    samples = max(size_of(setup.batches[0]), 1)
    return 6.0 * samples * sum(p.numel() for p in parameters) / speed, differentiates


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its context."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# Functions that multiply by a weight, and the place of the weight among their arguments.
_RIGHT = {"linear": 1, "matmul": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
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
        if isinstance(module, (*MAPS, nn.modules.conv._ConvTransposeNd)):
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


# Parameters on which the loss does not depend


LOOKED = 32  # most parameters that are moved alone


@torch.no_grad()
def unused(fork: Fork, batch: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return the parameters, out of `names`, that the loss of a batch does not depend on at all.

    Normal noise of their own rms, but at least 0.1, is added to all of them; if the loss changes,
    to one after the other, of which the limit leaves some undecided: these are not returned.
    """
    if not names:
        return ()
    loss, parameters = RepeatedLoss(fork), dict(fork.model.named_parameters())
    as_it_is = loss.of(batch)

    def are_unused(names: Sequence[str]) -> bool:
        before = [parameters[name].clone() for name in names]
        with seeded(fork.seed):
            for name, p in zip(names, before, strict=True):
                rms = max(float(p.float().square().mean().sqrt()), 0.1)
                parameters[name].add_(rms * torch.randn_like(p))
        same = math.isclose(loss.of(batch), as_it_is, rel_tol=1e-6)
        for name, p in zip(names, before, strict=True):
            parameters[name].copy_(p)
        return same

    if are_unused(names):
        return tuple(names)
    return tuple(name for name in names[:LOOKED] if are_unused([name]))
