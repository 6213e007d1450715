"""Questions about the terms of the loss: the numbers that are added, or subtracted, last."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from adiv_monitor.audit.experiments.backward import backward, cosine_and_ratio
from adiv_monitor.audit.experiments.calls import Call, see_calls, undropped, watched
from adiv_monitor.audit.experiments.changed_inputs import change_inputs
from adiv_monitor.audit.experiments.questions import Look, asks, looks
from adiv_monitor.audit.experiments.state import last_maps
from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.audit.training.train import train
from adiv_monitor.diagnosis.record import Fact

STEPS = 60  # most steps of the copy without the penalty; the run may have more
# A copy is trained only if the other terms rise by less than this share if inputs are exchanged.
LITTLE = 0.1
RISES = 1.2  # times the other terms at first, though the loss falls
_SAME = 1e-5  # relative rounding of a term in which samples come in another order
_SUMS = ("AddBackward", "SubBackward", "RsubBackward")
_SCALINGS = ("Mul", "Div", "Neg", "Mean", "Sum", "Squeeze", "View", "Clone")


class Terms:
    """Follows the numbers with a gradient in a pass, as its calls are reported.

    A term is a node of the graph: what is changed in place afterwards keeps its own.

    Attributes:
        values: The numbers.
        places: The calls that made them.
        sums: The sums that the loss consists of, once its terms were asked for.
    """

    def __init__(self) -> None:
        self.values: dict[Any, float] = {}
        self.places: dict[Any, str] = {}
        self.sums: set[Any] = set()

    def see(self, call: Call) -> None:
        """Note a number."""
        if isinstance(call.result, Tensor) and not call.result.ndim and call.result.requires_grad:
            self.values[call.result.grad_fn] = float(call.result.detach())
            self.places[call.result.grad_fn] = call.place

    def of(self, loss: Tensor) -> dict[Any, float]:
        """Return the terms of the loss, each with its part of the loss's value."""
        return dict(self._parts(loss.grad_fn, 1.0))

    def _parts(self, node: Any, factor: float) -> Iterator[tuple[Any, float]]:
        """Yield the terms of a sum, or of one that is scaled by a number."""
        before = [n for n, _ in node.next_functions if n is not None]
        if node.name().startswith(_SUMS):
            self.sums.add(node)
            signs = (-1.0 if node.name().startswith(name) else 1.0 for name in ("Rsub", "Sub"))
            for (n, _), sign in zip(node.next_functions, signs, strict=False):
                if n is not None:
                    yield from self._parts(n, sign * factor)
        elif node.name().startswith(_SCALINGS) and len(before) == 1 and self.values.get(before[0]):
            yield from self._parts(before[0], factor * self._value(node) / self.values[before[0]])
        else:
            yield node, factor * self._value(node)

    def _value(self, node: Any) -> float:
        """Return the number; a parameter's own node holds it."""
        return self.values[node] if node in self.values else float(node.variable)


@asks("penalty-dominates")
def penalty_dominates(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Train a copy without penalties, and compare what is learned of the inputs.

    A penalty is a term of the loss that stays the same if the model's inputs are exchanged between
    samples, such as one of the outputs' size, or a divergence from a prior: it does not depend on
    which input belongs to which target. At least one of the other terms does: by how much it rises
    with exchanged inputs is what the model has learned of them. All penalties are taken as one.
    Terms that alone teach some parameters, such as a codebook, are no penalty. Where the others
    rise though the loss falls, a penalty is a prize.
    """
    if len(own := _terms(setup.fork(), exchanged=False)) < 2:
        return ()
    exchanged = _terms(setup.fork(), exchanged=True)
    after, moved = (_terms(setup.fork_like(trained), moved) for moved in (False, True))
    if not len(own) == len(exchanged) == len(after) == len(moved):
        return ()
    penalties = {i for i in range(len(own))
                 if _alike(own[i], exchanged[i]) and _alike(after[i], moved[i])}  # fmt: skip

    def others(terms: list[float]) -> float:
        return sum(x for i, x in enumerate(terms) if i not in penalties)

    learnt, left = sum(moved) - sum(after), others(after)
    if not 0 < len(penalties) < len(own):
        return ()
    if sum(after) < sum(own) and 0 < RISES * others(own) < left:
        return (Fact("", {"before": others(own), "after": left, "falls": sum(own) - sum(after)}),)
    if not learnt < LITTLE * abs(left):
        return ()
    pairs = zip(backward(setup.fork()), backward(_without(setup.fork(), penalties)), strict=True)
    if any(g.any() and not h.any() for g, h in pairs):
        return ()
    fork = _without(replace(setup, steps=min(setup.steps, STEPS)).fork(), penalties)
    train(fork)
    freed, alone = (others(_terms(setup.fork_like(fork), moved)) for moved in (False, True))
    numbers = {"with": learnt, "without": alone - freed, "others": freed,
               "penalty": sum(own) - others(own)}  # fmt: skip
    return (Fact("", numbers),)


@asks("decay-fights")
def penalty_on_weights(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the length of the gradient of terms that depend on the weights alone, over the rest.

    They are the same for another batch, other random numbers and other outputs, and not 0: values
    that are asked for at fixed inputs, such as those at a boundary, are outputs.
    """
    batch = next((x for x in setup.batches if x is not setup.batches[0]), None)
    own = _terms(setup.fork(), exchanged=False)
    fork = replace(setup.fork(), seed=setup.seed + 1)
    fork.change_outputs(last_maps(setup.fork())[0], lambda x: 2 * x + 1)
    others = _terms(fork, exchanged=False, batch=batch)
    penalties = {i for i, (x, y) in enumerate(zip(own, others, strict=False)) if _alike(x, y) and x}
    if batch is None or len(own) != len(others) or not 0 < len(penalties) < len(own):
        return
    rest, both = backward(_without(setup.fork(), penalties)), backward(setup.fork())
    pull = cosine_and_ratio(rest, [h - g for g, h in zip(rest, both, strict=True)])[1]
    yield Fact("", {"pull": pull, "value": sum(own[i] for i in penalties), "loss": sum(own)})


def _terms(fork: Fork, exchanged: bool, batch: Any = None) -> list[float]:
    """Return the terms for a batch, by default the first; with inputs exchanged or not."""
    size = size_of(fork.batches[0])
    if exchanged:
        change_inputs(fork.model, lambda _, x: x.roll(1, 0) if x.shape[:1] == (size,) else x)
    terms = Terms()
    with torch.enable_grad():
        return [*terms.of(see_calls(fork, terms.see, batch)).values()]


def _without(fork: Fork, left_out: set[int]) -> Fork:
    """Return the fork, whose terms with these numbers have no gradient from now on."""
    own = fork.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        terms = Terms()
        found = watched(own, terms.see)(model, batch)
        for i, node in enumerate(terms.of(found)):
            if i in left_out:
                node.register_prehook(_nothing)
        return found

    fork.loss = loss
    return fork


def _alike(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=_SAME)


# Sums with what has no gradient

NOISE = 0.1  # of the spread of each parameter, and at least a hundredth
_ADDS = ("add", "sub", "__rsub__")


@looks("term-without-graph")
class WithoutGraph(Terms):
    """Tells terms of the loss that depend on parameters, but have no gradient.

    Two more passes show whether such a term changes with noise in the parameters, and not without.
    One with the value of another term takes it back, so that the loss has another value than its
    gradient's, on purpose.
    """

    def __init__(self, fork: Fork) -> None:
        super().__init__()
        self._fork = fork
        self.added: dict[int, tuple[Call, float]] = {}

    def see(self, call: Call) -> None:
        """Note numbers without a gradient that are added to one with a gradient."""
        super().see(call)
        if call.name in _ADDS and call.result.requires_grad and not call.result.ndim:
            plain = [float(x) for x in call.args[:2] if not getattr(x, "requires_grad", False)]
            if len(plain) == 1:
                self.added[call.number] = call, plain[0]

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return one fact for each such term."""
        known = self.of(loss).values()
        found = {number: (call.place, x) for number, (call, x) in self.added.items()
                 if call.result.grad_fn in self.sums}  # fmt: skip
        if not found or any(_alike(abs(x), abs(y)) for _, x in found.values() for y in known):
            return
        same, moved = self._again(0.0), self._again(NOISE)
        for number, (place, x) in found.items():
            if _alike(same[number], x) and not _alike(moved[number], x):
                yield Fact(place, {"value": x, "loss": float(loss.detach())})

    def _again(self, noise: float) -> dict[int, float]:
        """Return what is added with noise in the parameters."""
        again, own = WithoutGraph(self._fork), {p: p.data for p in self._fork.model.parameters()}
        with seeded(self._fork.seed), torch.enable_grad():
            for p, here in own.items():
                spread = max(float(here.std(correction=0)), NOISE) * p.requires_grad
                p.data = here + noise * spread * torch.randn_like(here)
            see_calls(self._fork, again.see, change=undropped)
        for p, here in own.items():
            p.data = here
        return {number: x for number, (_, x) in again.added.items()}


# Terms against each other

MOST_TERMS = 6


@asks("terms-opposed")
def opposed(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the two terms of the first batch's loss whose gradients oppose each other most.

    Of parameters that both terms reach, it tells the cosine of the gradients, the largest cosine of
    a single parameter tensor, and the ratio of the shorter to the longer gradient.
    """
    fork, seen, found, gradients = setup.fork(), Terms(), [], []
    with torch.enable_grad():
        loss = see_calls(fork, seen.see, change=undropped)
    terms, parameters = seen.of(loss), [p for p in fork.model.parameters() if p.requires_grad]
    if not 1 < len(terms) <= MOST_TERMS:
        return
    for node in terms:  # the others pass none on
        handles = [other.register_prehook(_nothing) for other in terms if other is not node]
        each = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        gradients.append((seen.places.get(node, ""), each))
        for handle in handles:
            handle.remove()
    for (place, own), (other, others) in permutations(gradients, 2):
        both = [(g, h) for g, h in zip(own, others, strict=True)
                if g is not None and h is not None and g.any() and h.any()]  # fmt: skip
        if both:
            cosine, ratio = cosine_and_ratio(*zip(*both, strict=True))
            largest = max(cosine_and_ratio([g], [h])[0] for g, h in both)
            found += [(cosine, largest, ratio, place, other)] * (ratio <= 1)
    for cosine, largest, ratio, place, other in sorted(found)[:1]:
        yield Fact(place, {"cosine": cosine, "largest": largest, "ratio": ratio}, {"other": other})


def _nothing(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(g) for g in gradients)


# A target that passes gradients on

DISCOUNT = 0.5, 0.9999  # of the value that follows; two views of a sample have 1
_EXACT = 1e-3


@looks("target-attached")
class Attached(Look):
    """Tells a network that runs twice, and gets minus a constant share of the gradients once.

    That of the value that follows is the discount, if a temporal difference is not cut off there.
    """

    def __init__(self, fork: Fork) -> None:
        self._made: dict[str, list[Tensor]] = {}
        for path, module in fork.model.named_modules():
            module.register_forward_hook(partial(self._note, path))

    def _note(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.retain_grad()
            self._made.setdefault(path, []).append(output)

    def facts(self, loss: Tensor) -> Iterable[Fact]:
        """Return the first such module."""
        for path, made in self._made.items():
            found = [x.grad.flatten(1).sum(1) for x in made if x.grad is not None and x.ndim > 1]
            if len(made) == len(found) == 2 and found[0].shape == found[1].shape:
                one, other = sorted(found, key=lambda g: float(g.abs().sum()))
                shares = (-one / other)[other != 0]
                share = float(shares.max()) if len(shares) else math.nan
                fits = ((shares - share).abs() < _EXACT) | (shares == 0)  # 0: the episode ends
                if DISCOUNT[0] < share < DISCOUNT[1] and len(shares) > 2 and bool(fits.all()):
                    return (Fact(path, {"share": share}),)
        return ()
