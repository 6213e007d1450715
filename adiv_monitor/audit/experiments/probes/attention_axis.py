"""Do attention weights sum to 1 along another axis than the one that they are summed over?"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, change_calls, see_calls
from adiv_monitor.audit.experiments.derived import PRODUCTS, Derived
from adiv_monitor.audit.experiments.dropout import rate_of, with_rate
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.setup import Fork, Setup
from adiv_monitor.diagnosis.record import Fact

ENTRYWISE = ("mul", "multiply", "__mul__", "__rmul__")
_EXACT = 1e-4  # deviation from 1 of sums of float32 numbers


class Use(NamedTuple):
    """A product that sums weights over an axis.

    Attributes:
        softmax: the call that made the weights.
        product: the call that sums them.
        shape: shape of the weights.
        sums_to_1: axes along which the weights sum to 1.
        over: axes over which the product sums.
    """

    softmax: Call
    product: Call
    shape: tuple[int, ...]
    sums_to_1: tuple[int, ...]
    over: tuple[int, ...]


@asks("attention-axis")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the softmaxes of scores whose products sum the weights over another axis."""
    found: dict[str, Fact] = {}
    for use in mismatches(setup.fork()):
        words = {
            "product": use.product.place,
            "shape": str(use.shape),
            "axis": str(use.sums_to_1[0]),
            "over": str(use.over[0]),
        }
        found.setdefault(use.softmax.place, Fact(use.softmax.place, {"sums": 1.0}, words))
    return tuple(found.values())


def mismatches(fork: Fork) -> list[Use]:
    """Return the uses of weights that sum to 1 along no axis that the product sums over."""
    return [use for use in uses(fork) if not set(use.sums_to_1) & set(use.over)]


def uses(fork: Fork) -> list[Use]:
    """Return the products with the result of a softmax of scores.

    Scores are a product of two tensors that are no layer's weights, such as queries and keys. The
    logits of a layer may assign rows to clusters, whose members are summed on purpose. A softmax
    over an axis of length 1 counts for any logits. A product of two matrices of weights is again
    one, and does not count. Dropout, which changes the sums, drops nothing.
    """
    whole = replace(fork)
    change_calls(whole, lambda call: with_rate(call, 0.0) if rate_of(call) > 0 else NotImplemented)
    scores, weights = Derived(), Derived()
    weighted: dict[int, tuple[Call, Tensor]] = {}  # products entry by entry, and their weights
    found: list[Use] = []

    def look(call: Call) -> None:
        scores.follow(call)
        if call.name in ENTRYWISE:
            for x in call.args:
                if weights.source(x) is not None and isinstance(call.result, Tensor):
                    weighted[id(call.result)] = call, x
        elif call.name == "sum" and call.args and id(call.args[0]) in weighted:
            found.extend(_summed_up(call, *weighted[id(call.args[0])], weights))
        weights.follow(call)
        if call.name in PRODUCTS and call.name != "linear":
            scores.begin(call)
        if call.name == "softmax" and call.path is not None:
            x = call.argument(0, "input")
            axis = call.argument(1, "dim")
            if isinstance(axis, int) and (scores.source(x) is not None or x.shape[axis] == 1):
                weights.begin(call)
        found.extend(_used(call, weights))

    with torch.no_grad():
        see_calls(whole, look)
    return found


def _used(call: Call, weights: Derived) -> Iterator[Use]:
    operands = list(summed(call))
    if all(weights.source(x) is None for x, _ in operands):
        return
    sums = [sums_to_1(x) for x, _ in operands]
    for i, (x, over) in enumerate(operands):
        softmax = weights.source(x)
        others = [set(sums[j]) & set(operands[j][1]) for j in range(len(operands)) if j != i]
        if softmax is not None and over and sums[i] and not any(others):
            yield Use(softmax, call, tuple(x.shape), sums[i], over)


def _summed_up(call: Call, product: Call, x: Tensor, weights: Derived) -> Iterator[Use]:
    """Yield the use of weights that are multiplied entry by entry and then summed over axes."""
    axes = call.argument(1, "dim", call.kwargs.get("axis"))
    result, softmax = product.result, weights.source(x)
    axes = (axes,) if isinstance(axes, int) else tuple(axes or range(result.ndim))
    over = tuple(axis % result.ndim - (result.ndim - x.ndim) for axis in axes)
    over = tuple(axis for axis in over if axis >= 0 and x.shape[axis] > 1)
    ones = sums_to_1(x)
    if softmax is not None and over and ones:
        yield Use(softmax, call, tuple(x.shape), ones, over)


def summed(call: Call) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield each operand of a product with the axes that the product sums over."""
    if call.name == "einsum":
        yield from _of_einsum(call)
        return
    if call.name not in PRODUCTS or call.name in ("linear", "baddbmm"):
        return
    operands = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)][:2]
    if len(operands) < 2:
        return
    left, right = reversed(operands) if call.name == "__rmatmul__" else operands
    yield left, (left.ndim - 1,)
    yield right, (max(right.ndim - 2, 0),)


def _of_einsum(call: Call) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    equation, *operands = call.args
    if not isinstance(equation, str) or "->" not in equation:
        return
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = [*operands[0]]
    inputs, output = equation.replace(" ", "").split("->")
    for letters, x in zip(inputs.split(","), operands, strict=True):
        others = "." * (x.ndim - len(letters.replace("...", "")))  # the axes of an ellipsis
        letters = letters.replace("...", others)
        yield x, tuple(i for i, letter in enumerate(letters) if letter not in output)


def sums_to_1(x: Tensor) -> tuple[int, ...]:
    """Return the axes along which all sums of a tensor without negative entries are 1."""
    if not x.is_floating_point() or not x.numel() or not bool((x >= 0).all()):
        return ()
    exact = max(_EXACT, 4 * torch.finfo(x.dtype).eps)
    sums = [x.detach().double().sum(axis) - 1 for axis in range(x.ndim)]
    return tuple(axis for axis, far in enumerate(sums) if float(far.abs().max()) < exact)
