"""What functions take and give: weights, hidden parameters, divisors, and results that are lost."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import nodes_of
from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.changed_inputs import ChangedInputs, still
from adiv_monitor.audit.experiments.derived import flat
from adiv_monitor.audit.experiments.flat import ends_of_function
from adiv_monitor.audit.experiments.questions import asks, first_at_each_place, looks
from adiv_monitor.audit.training.batches import first
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import held
from adiv_monitor.diagnosis.record import Fact

SAMPLES = 12  # most samples of a batch
LEAST = 4  # samples: of fewer, some sums are samples themselves
MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm",
            "einsum", "conv1d", "conv2d", "conv3d", "bilinear")  # fmt: skip
ENTRIES = 64  # fewest of a weight: the mean of fewer differs from zero by chance
ONE_SIDED = 0.3  # abs(mean) / rms
DEVIATIONS = 4.0  # of the mean of independent entries around zero: 1 / sqrt(their number)
BATCHES = 4  # most batches, if the first has divisors of both signs
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
    made: dict[int, tuple[Call, Tensor]] = {}  # tensors are held so that ids stay unique
    used: set[int] = set()

    def look(call: Call) -> None:
        used.update(map(id, flat([*call.args, *call.kwargs.values()])))
        x, given = call.result, call.argument(0, "input")
        is_new = isinstance(x, Tensor) and x is not given and x.requires_grad
        if is_new and call.path is not None and ends_of_function(call.name, call.kwargs):
            made[id(x)] = call, x

    given_out: list[Tensor] = []
    fork.model.register_forward_hook(lambda module, args, out: given_out.extend(flat(out)))
    layers = _maps(fork)
    with torch.enable_grad():
        loss = see_calls(fork, look)
    used |= {id(loss), *map(id, given_out)}
    reached = nodes_of([loss.grad_fn])
    lost = [call for key, (call, x) in made.items() if key not in used and x.grad_fn not in reached]
    facts = [*first_at_each_place(Fact(call.place, {}, {"by": "lost"}) for call in lost)]
    if len(layers) > 1:
        moved = _switched_on(still(setup.fork()))
        if _is_affine(moved, first(setup.batches[0], SAMPLES)):
            facts.append(Fact("", {"layers": float(len(layers))}, {"by": "affine"}))
    return facts


def _maps(fork: Fork) -> dict[str, None]:
    """Return the paths of the linear and convolutional layers that run from now on, in order."""
    found: dict[str, None] = {}
    for path, module in fork.model.named_modules():
        if isinstance(module, MAPS):
            module.register_forward_hook(lambda m, args, out, path=path: found.setdefault(path))
    return found


def maps_that_run(fork: Fork) -> list[str]:
    """Return the paths of the linear and convolutional layers that the loss runs."""
    found = _maps(fork)
    with torch.no_grad():
        see_calls(fork, lambda call: None)
    return list(found)


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


def _is_affine(fork: Fork, batch: Any) -> bool:
    """Return whether f(a + b − c) = f(a) + f(b) − f(c) for samples a, b and c of a batch.

    It is False if the model has not exactly one input, of floating-point numbers.
    """
    probe = ChangedInputs(fork, batch)
    if len(probe.inputs) != 1 or not probe.inputs[0].is_floating_point():
        return False

    def mixed(x: Tensor) -> Tensor:
        return x + x.roll(1, 0) - x.roll(2, 0)

    size = len(probe.inputs[0])
    pairs = [(mixed(x), y) for x, y in zip(probe.own, probe.outputs(0, mixed), strict=True)
             if x.ndim and len(x) == size]  # fmt: skip
    spread = [float((x - x.mean(0)).norm()) for x, _ in pairs]
    return (
        bool(pairs)
        and size >= LEAST
        and all(
            s > _SAME * float(x.norm()) and float((x - y).norm()) <= _SAME * s
            for (x, y), s in zip(pairs, spread, strict=True)
        )
    )


@looks("one-sided-weights")
class OneSided:
    """Do weights that multiply inputs begin with nearly one sign, like those of torch.rand?"""

    def __init__(self, fork: Fork) -> None:
        self.weights: dict[str, Tensor] = {}
        self._names = {id(p): name for name, p in fork.model.named_parameters()}

    def see(self, call: Call) -> None:
        """Look for weights; complex numbers have no sign."""
        for x in call.args if call.name in PRODUCTS else ():
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
    fork = setup.fork()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def look(call: Call) -> None:
        divisor = call.argument(_DIVISOR[call.name], "other") if call.name in _DIVISOR else None
        if isinstance(divisor, Tensor) and divisor.is_floating_point():
            pair = divisor.float().flatten(), call.result.float().flatten()
            found.setdefault(call.place, []).append(pair)

    facts: list[Fact] = []
    with torch.no_grad():
        for batch in setup.batches[:BATCHES]:
            see_calls(fork, look, batch)
            facts = []
            for place, pairs in found.items():
                divisors, results = (torch.cat(parts) for parts in zip(*pairs, strict=True))
                close, sizes = closeness(divisors), results.abs()
                sizes = sizes[sizes > 0]
                if close is not None and len(sizes) and bool(sizes.isfinite().all()):
                    times = float(sizes.max() / sizes.median())
                    facts.append(Fact(place, {"close": close, "times": times}))
            if not facts:
                break
    return facts


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
        self._known = {id(p) for p in (*fork.model.parameters(), *held(fork.optimizer))}
        self._count = sum(p.numel() for p in fork.model.parameters())
        self._inside: dict[int, tuple[str, Tensor]] = {}
        self._anew: list[Fact] = []
        self._made: list[Tensor] = []  # they are held so that their memory is not reused
        for path, module in fork.model.named_modules():
            for name, x in _attributes(module):
                if id(x) not in self._known:
                    self._inside.setdefault(id(x), (f"{path}.{name}".lstrip("."), x))
        self._known |= self._inside.keys()

    def see(self, call: Call) -> None:
        """Look for parameters in memory that the pass has made."""
        result = next(flat(call.result), None)
        if call.path is None or result is None:
            return
        if not result.requires_grad:
            self._made.append(result)
        for x in flat([*call.args, *call.kwargs.values()]):
            is_known = not isinstance(x, nn.Parameter) or id(x) in self._known
            if not is_known and result.grad_fn is not None and self._is_new(x):
                share = x.numel() / (self._count + x.numel())
                self._anew.append(Fact(call.place, {"share": share}, {"made": "anew"}))

    def _is_new(self, x: Tensor) -> bool:
        return any(y.shape == x.shape and y.data_ptr() == x.data_ptr() for y in self._made)

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return leaves that get a gradient, and the places where a new parameter is used."""
        found = self.hidden(loss)
        every = self._count + sum(p.numel() for p in found.values())
        facts = [Fact(name, {"share": p.numel() / every}, {"shape": str(tuple(p.shape))})
                 for name, p in found.items()]  # fmt: skip
        return (*facts, *first_at_each_place(self._anew))

    def hidden(self, loss: Tensor) -> dict[str, Tensor]:
        """Return attribute name → tensor for those that get a gradient from a loss."""
        reached = {id(getattr(node, "variable", None)) for node in nodes_of([loss.grad_fn])}
        return {name: x for key, (name, x) in self._inside.items() if key in reached}


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
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
