"""Can the function behind the last layer reach the targets?"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.seen.calls import Call, see_calls
from adiv_monitor.audit.seen.probes.broadcast_loss import DIFFERENCES
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact, Probed

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


def ask(setup: Setup, trained: Fork) -> Probed:
    """Return the share of targets that the function on the outputs can't reach.

    These are targets outside its range, rows of targets of several classes at once, if it is a
    softmax, whose results sum to 1, or targets of a binary cross-entropy below 0 or above 1.
    """
    found: dict[str, list[float]] = {}
    words: dict[str, dict[str, str]] = {}
    for batch in setup.batches[:BATCHES]:
        for bounds, share in beyond(setup.fork(), batch):
            place = bounds.last.place
            found.setdefault(place, []).append(share)
            ends = {"low": f"{bounds.low:g}", "high": f"{bounds.high:g}"}
            words[place] = {"function": bounds.last.name, **ends}
        for call, share in of_several(setup.fork(), batch):
            found.setdefault(call.place, []).append(share)
            words[call.place] = {"function": call.name, "sum": "1"}
        for call, share, farthest in no_probabilities(setup.fork(), batch):
            found.setdefault(call.place, []).append(share)
            words[call.place] = {"function": call.name, "farthest": f"{farthest:.3g}"}
    return Probed(tuple(
        Fact(place, {"share": sum(shares) / len(shares)}, words[place])
        for place, shares in found.items() if any(shares)
    ))  # fmt: skip


def beyond(fork: Fork, batch: object = None) -> list[tuple[Bounds, float]]:
    """Return bounds of tensors that are subtracted from targets.

    Each comes with the share of these targets outside of them. Bounded results that are multiplied
    by, or added to, tensors that depend on no parameters remain bounded.
    """
    made = _Made()
    found: list[tuple[Bounds, float]] = []

    def look(call: Call) -> None:
        for output, target in _compared(call, "binary_cross_entropy"):
            bounds = made.of(output)
            if bounds is not None:
                outside = (target < bounds.low) | (target > bounds.high)
                found.append((bounds, float(outside.float().mean())))
        bounds = _bounds(call, made)
        if bounds is not None:
            made.note(call.result, bounds)

    see_calls(fork, look, batch)
    return found


def of_several(fork: Fork, batch: object = None) -> list[tuple[Call, float]]:
    """Return softmaxes whose results are compared with targets of the same shape.

    Each comes with the share of rows of targets that sum to more than `SEVERAL`.
    """
    made = _Made()
    found: list[tuple[Call, float]] = []

    def look(call: Call) -> None:
        for output, target in _compared(call, "binary_cross_entropy"):
            softmax = made.of(output)
            if softmax is not None and output.shape == target.shape == softmax.result.shape:
                found.append((softmax, _several(target, softmax.argument(1, "dim"))))
        if call.name == "cross_entropy":
            logits, target = call.argument(0, "input"), call.argument(1, "target")
            if logits.shape == target.shape and not target.requires_grad:
                found.append((call, _several(target, min(1, logits.ndim - 1))))
        elif call.name == "softmax" and isinstance(call.argument(1, "dim"), int):
            made.note(call.result, call)

    see_calls(fork, look, batch)
    return found


def no_probabilities(fork: Fork, batch: object = None) -> list[tuple[Call, float, float]]:
    """Return binary cross-entropies with the share of their targets below 0 or above 1.

    Each comes with the target farthest from them, too.
    """
    calls: list[tuple[Call, Tensor]] = []

    def look(call: Call) -> None:
        # `binary_cross_entropy` refuses such targets.
        is_binary = call.name == "binary_cross_entropy_with_logits"
        target = call.argument(1, "target") if is_binary else None
        if isinstance(target, Tensor) and not target.requires_grad and call.result.requires_grad:
            call.result.retain_grad()
            calls.append((call, target.double()))

    with torch.enable_grad():
        loss = see_calls(fork, look, batch)
        if calls:
            loss.backward()  # type: ignore[no-untyped-call]
    found = []
    for call, target in calls:
        # Without a reduction, a mask may leave targets out.
        gradient = call.result.grad
        if gradient is not None and gradient.shape == target.shape:
            target = target[gradient != 0]
        if target.numel():
            outside = float(((target < 0) | (target > 1)).double().mean())
            farthest = float(target.flatten()[(target - 0.5).abs().argmax()])
            found.append((call, outside, farthest))
    return found


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
