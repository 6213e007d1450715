"""Can the function behind the last layer reach the targets?"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.probes.broadcast_loss import DIFFERENCES
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

RANGES: Mapping[str, tuple[float, float]] = {
    "relu": (0.0, math.inf),
    "softplus": (0.0, math.inf),
    "relu6": (0.0, 6.0),
    "sigmoid": (0.0, 1.0),
    "special_expit": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "hardtanh": (-1.0, 1.0),
}
# Linear in each operand, but for divisors.
LINEAR = ("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__", "rsub", "mul",
          "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__",
          "neg", "__neg__")  # fmt: skip
BATCHES = 2
SEVERAL = 1.5  # sum of the targets of a sample from which on they are of several classes


class Bounds(NamedTuple):
    """The values that a tensor can have.

    Attributes:
        last: The call of the function with a bounded range that it derives from.
        low: No entry is below this.
        high: No entry is above this.
    """

    last: Call
    low: float
    high: float


class Targets(NamedTuple):
    """What a loss compares with targets that it may not reach.

    Attributes:
        beyond: Bounds of tensors that are subtracted from targets, with the share of these outside
            of them. Bounded results that are multiplied by, or added to, tensors that depend on no
            parameters remain bounded.
        several: Softmaxes whose results are compared with targets of the same shape, with the share
            of rows of targets that sum to more than `SEVERAL`.
        binary: Binary cross-entropies, with the share of their targets below 0 or above 1, and the
            target farthest from them.
    """

    beyond: list[tuple[Bounds, float]]
    several: list[tuple[Call, float]]
    binary: list[tuple[Call, float, float]]


@asks("targets-out-of-range")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the share of targets that the function on the outputs can't reach.

    These are targets outside its range, rows of targets of several classes at once, if it is a
    softmax, whose results sum to 1, or targets of a binary cross-entropy below 0 or above 1.
    """
    found: dict[str, list[float]] = {}
    words: dict[str, dict[str, str]] = {}
    for batch in setup.batches[:BATCHES]:
        targets = compared(setup.fork(), batch)
        for bounds, share in targets.beyond:
            place = bounds.last.place
            found.setdefault(place, []).append(share)
            ends = {"low": f"{bounds.low:g}", "high": f"{bounds.high:g}"}
            words[place] = {"function": bounds.last.name, **ends}
        for call, share in targets.several:
            found.setdefault(call.place, []).append(share)
            words[call.place] = {"function": call.name, "sum": "1"}
        for call, share, farthest in targets.binary:
            found.setdefault(call.place, []).append(share)
            words[call.place] = {"function": call.name, "farthest": f"{farthest:.3g}"}
    return tuple(
        Fact(place, {"share": sum(shares) / len(shares)}, words[place])
        for place, shares in found.items() if any(shares)
    )  # fmt: skip


def compared(fork: Fork, batch: object = None) -> Targets:
    """Return what a fork's loss of a batch, of its first by default, compares with targets."""
    ranges, softmaxes = _Made(), _Made()
    bounded: list[tuple[Call, Bounds, Tensor]] = []
    several: list[tuple[Call, float]] = []
    binary: list[tuple[Call, Tensor]] = []

    def look(call: Call) -> None:
        for output, target in _compared(call, "binary_cross_entropy"):
            if (bounds := ranges.of(output)) is not None:
                outside = (target < bounds.low) | (target > bounds.high)
                bounded.append((call, bounds, outside))
            softmax = softmaxes.of(output)
            if softmax is not None and output.shape == target.shape == softmax.result.shape:
                several.append((softmax, _several(target, softmax.argument(1, "dim"))))
        if (made := _bounds(call, ranges)) is not None:
            ranges.note(call.result, made)
        target = call.argument(1, "target")
        if call.name == "cross_entropy":
            logits = call.argument(0, "input")
            if logits.shape == target.shape and not target.requires_grad:
                several.append((call, _several(target, min(1, logits.ndim - 1))))
        elif call.name == "softmax" and isinstance(call.argument(1, "dim"), int):
            softmaxes.note(call.result, call)
        elif (
            call.name == "binary_cross_entropy_with_logits"  # the one of probabilities refuses them
            and not target.requires_grad
            and call.result.requires_grad
        ):
            binary.append((call, target.double()))

    with torch.enable_grad():
        loss = see_calls(fork, look, batch)
    count = _counting(loss, [*(x[0] for x in bounded), *(x[0] for x in binary)])
    beyond = []
    for call, bounds, outside in bounded:
        if (counted := count(call, outside)).numel():
            beyond.append((bounds, float(counted.float().mean())))
    found = []
    for call, target in binary:
        if (counted := count(call, target)).numel():
            share = float(((counted < 0) | (counted > 1)).double().mean())
            found.append((call, share, float(counted.flatten()[(counted - 0.5).abs().argmax()])))
    return Targets(beyond, several, found)


def _counting(loss: Tensor, calls: Sequence[Call]) -> Callable[[Call, Tensor], Tensor]:
    """Return a function that selects the entries of targets that count in the loss.

    If a call compares entry by entry, a mask may leave some out: their gradient is zero.
    """
    results = {id(call.result): call.result for call in calls if call.result.requires_grad}
    gradients: dict[int, Tensor | None] = {}
    if results and loss.requires_grad:
        found = torch.autograd.grad(loss, list(results.values()), allow_unused=True)
        gradients = dict(zip(results, found, strict=True))

    def count(call: Call, target: Tensor) -> Tensor:
        gradient = gradients.get(id(call.result))
        if gradient is None or gradient.shape != target.shape:
            return target
        return target[gradient != 0]

    return count


class _Made:
    """What is known of tensors, identified by their memory: views have it, too."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, int, Any]] = {}  # held, so that memory is not reused

    def note(self, x: Tensor, known: Any) -> None:
        self._of[x.untyped_storage().data_ptr()] = x, x._version, known

    def of(self, x: object) -> Any:
        if not isinstance(x, Tensor):
            return None
        _, version, known = self._of.get(x.untyped_storage().data_ptr(), (None, -1, None))
        return known if version == x._version else None


def _compared(call: Call, *names: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each side of a difference with the other side, if that depends on no parameters.

    A single number is no target, but scales or moves outputs.
    """
    if call.name in (*DIFFERENCES, *names) and len(call.args) > 1:
        a, b = call.args[:2]
        for output, target in ((a, b), (b, a)):
            are_tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
            if are_tensors and not target.requires_grad and target.numel() > 1:
                yield output, target


def _several(target: Tensor, axis: int) -> float:
    return float((target.float().sum(axis) > SEVERAL).float().mean())


def _bounds(call: Call, made: _Made) -> Bounds | None:
    """Return the bounds of a call's result; None: it has none."""
    if not isinstance(call.result, Tensor):
        return None
    if call.name in RANGES:
        given = made.of(call.args[0]) if call.args else None
        if given is None:
            return Bounds(call, *RANGES[call.name])
        low, high = (float(call.function(torch.tensor(x), *call.args[1:])) for x in given[1:])
        return Bounds(given.last, low, high)  # these functions are monotone
    if call.name not in LINEAR or call.kwargs or next(_compared(call), None) is not None:
        return None
    sources = [bounds for x in call.args if (bounds := made.of(x)) is not None]
    ends = [end for x in call.args if (end := _ends(x, made)) is not None]
    if len(sources) != 1 or len(ends) < len(call.args):
        return None
    if "div" in call.name and ends[1][0] <= 0 <= ends[1][1]:
        return None
    values = [float(call.function(*map(torch.tensor, corner))) for corner in product(*ends)]
    if any(map(math.isnan, values)):
        return None
    return Bounds(sources[0].last, min(values), max(values))


def _ends(x: object, made: _Made) -> tuple[float, float] | None:
    """Return the smallest and the largest value; None: they depend on parameters."""
    if (bounds := made.of(x)) is not None:
        return bounds.low, bounds.high
    if isinstance(x, (int, float)):
        return float(x), float(x)
    if not isinstance(x, Tensor) or x.requires_grad or not x.numel() or x.is_complex():
        return None
    return float(x.min()), float(x.max())
