"""What functions take and give: weights, hidden parameters, divisors, and results that are lost."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, calls_of, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.concerned import SAMPLES
from adiv_monitor.audit.experiments.derived import PRODUCTS, flat, given
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.audit.experiments.questions import asks, first_at_each_place, looks
from adiv_monitor.audit.training.batches import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact

LEAST = 4  # samples: of fewer, some sums are samples themselves
MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHTED = (*PRODUCTS, "addmm", "conv1d", "conv2d", "conv3d", "bilinear")
ENTRIES = 64  # fewest of a weight: the mean of fewer differs from zero by chance
ONE_SIDED = 0.3  # abs(mean) / rms
DEVIATIONS = 4.0  # of the mean of independent entries around zero: 1 / sqrt(their number)
BATCHES = 4  # most whose divisors are taken together
DIVISORS = 16  # fewest
_SAME = 1e-4  # share of the outputs' spread: rounding in a network of many layers
_DIVISOR = {"div": 1, "divide": 1, "true_divide": 1, "__truediv__": 1, "__itruediv__": 1,
            "__rtruediv__": 0, "__rdiv__": 0, "reciprocal": 0}  # fmt: skip


@asks("no-activation")
def no_activation(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Report lost results of activation functions, and a model of several maps that is affine.

    A result is lost if no other function uses it, nor the loss. A custom function, whose call is
    not seen, shows in the graph of the loss.
    """
    fork = setup.fork()
    made: list[tuple[Call, Tensor]] = []
    used: list[Tensor] = []  # they are held so that ids stay unique

    def see(call: Call) -> None:
        used.extend(given(call))
        x = call.result
        is_new = isinstance(x, Tensor) and x is not call.argument(0, "input") and x.requires_grad
        if is_new and call.path is not None and ends_of_function(call.name, call.kwargs):
            made.append((call, x))

    fork.model.register_forward_hook(lambda module, args, out: used.extend(flat(out)))
    with torch.enable_grad():
        loss = see_calls(fork, see)
    known, reached = {id(loss), *map(id, used)}, nodes_of([loss.grad_fn])
    lost = [call for call, x in made if id(x) not in known and x.grad_fn not in reached]
    facts = [*first_at_each_place(Fact(call.place, {}, {"by": "lost"}) for call in lost)]
    layers = len(maps_that_run(setup.fork()))
    if layers > 1 and _is_affine(_switched_on(still(setup.fork()))):
        facts.append(Fact("", {"layers": float(layers)}, {"by": "affine"}))
    return facts


def maps_that_run(fork: Fork) -> list[str]:
    """Return the paths of the linear and convolutional layers that the loss runs."""
    found: dict[str, None] = {}
    for path, module in fork.model.named_modules():
        if isinstance(module, MAPS):
            module.register_forward_hook(lambda m, args, out, path=path: found.setdefault(path))
    with torch.no_grad():
        fork.first_loss()
    return [*found]


@torch.no_grad()
def _switched_on(fork: Fork) -> Fork:
    """Move gains, biases and weights that are zero, so that no branch is multiplied by next to 0.

    Residual branches may begin so (ReZero, LayerScale, a last layer of zeros). An affine model
    stays affine whatever its weights are.
    """
    with seeded(fork.seed):
        for p in fork.model.parameters():
            if p.is_floating_point() and (p.ndim < 2 or p.squeeze().ndim < 2 or not p.any()):
                p.add_(torch.randn_like(p), alpha=0.3)
    return fork


def _is_affine(fork: Fork) -> bool:
    """Return whether f(a + b − c) = f(a) + f(b) − f(c) for samples a, b and c of the first batch.

    It is False if the model has not exactly one input, of floating-point numbers.
    """
    run = ChangedInputs(fork, first(fork.batches[0], SAMPLES))
    if len(run.inputs) != 1 or not run.inputs[0].is_floating_point():
        return False

    def mixed(x: Tensor) -> Tensor:
        return x + x.roll(1, 0) - x.roll(2, 0)

    def fits(x: Tensor, y: Tensor) -> bool:
        spread = float((x - x.mean(0)).norm())
        return spread > _SAME * float(x.norm()) and float((mixed(x) - y).norm()) <= _SAME * spread

    size = len(run.inputs[0])
    pairs = [(x, y) for x, y in zip(run.own, run.outputs(mixed), strict=True)
             if x.shape[:1] == (size,)]  # fmt: skip
    return size >= LEAST and bool(pairs) and all(fits(x, y) for x, y in pairs)


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


@asks("unsafe-division")
def unsafe_division(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return divisions by tensors of both signs, with the size of the smallest over the median one.

    Also return the largest result over the median one, without units that are off.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch in setup.batches[:BATCHES]:
        for call in calls_of(setup.fork(), lambda call: call.name in _DIVISOR, batch):
            divisor = call.argument(_DIVISOR[call.name], "other")
            if isinstance(divisor, Tensor) and divisor.is_floating_point():
                pair = divisor.float().flatten(), call.result.abs().float().flatten()
                found.setdefault(call.place, []).append(pair)
    for place, pairs in found.items():
        divisors, sizes = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        close, sizes = closeness(divisors), sizes[sizes > 0]
        if close is not None and len(sizes) and bool(sizes.isfinite().all()):
            yield Fact(place, {"close": close, "times": float(sizes.max() / sizes.median())})


def closeness(divisors: Tensor) -> float | None:
    """Return the smallest size of the divisors over the median one; None: they have one sign."""
    sizes = divisors.abs().sort().values
    if len(sizes) < DIVISORS or not bool((divisors > 0).any() and (divisors < 0).any()):
        return None
    middle = float(sizes[len(sizes) // 2])
    return float(sizes[0]) / middle if middle > 0 else None


@looks("hidden-parameters")
class Hidden:
    """Does the forward pass use parameters that the model does not register?

    They stay in an attribute of a module that torch does not search, or each pass makes them anew.
    """

    def __init__(self, fork: Fork) -> None:
        known = {id(p) for p in (*fork.model.parameters(), *held(fork.optimizer))}
        self._count = sum(p.numel() for p in fork.model.parameters())
        self._inside = {id(x): (f"{path}.{name}".lstrip("."), x)
                        for path, module in fork.model.named_modules()
                        for name, x in _attributes(module) if id(x) not in known}  # fmt: skip
        self._known = known | self._inside.keys()
        self._anew: list[Fact] = []

    def see(self, call: Call) -> None:
        """Look for parameters that the model did not have before the pass."""
        is_used = call.path is not None and any(x.grad_fn for x in flat(call.result))
        for x in given(call) if is_used else ():
            if isinstance(x, nn.Parameter) and id(x) not in self._known:
                share = x.numel() / (self._count + x.numel())
                self._anew.append(Fact(call.place, {"share": share}, {"made": "anew"}))

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return leaves that get a gradient, and the places where a new parameter is used."""
        reached = {id(getattr(node, "variable", None)) for node in nodes_of([loss.grad_fn])}
        found = [known for key, known in self._inside.items() if key in reached]
        every = self._count + sum(x.numel() for _, x in found)
        facts = [Fact(name, {"share": x.numel() / every}, {"shape": str(tuple(x.shape))})
                 for name, x in found]  # fmt: skip
        return (*facts, *first_at_each_place(self._anew))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in plain attributes by name, also in modules in lists and dictionaries."""
    for name, value in vars(module).items():
        if not name.startswith(("_parameters", "_buffers", "_modules")):
            yield from _tensors(name, value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", p) for inner, p in value.named_parameters())
    elif isinstance(value, (list, tuple, Mapping)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}[{key!r}]", item)
