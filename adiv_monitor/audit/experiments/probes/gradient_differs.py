"""Is the gradient that the backward pass returns the gradient of the loss?"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.outputs import in_float64, made_in_float64
from adiv_monitor.audit.experiments.probes.gradient_cut import is_cut
from adiv_monitor.audit.experiments.questions import Untold, asks
from adiv_monitor.audit.experiments.repeated_loss import RepeatedLoss
from adiv_monitor.audit.training.batches import copied, mapped
from adiv_monitor.audit.training.hooks import without_gradient_hooks
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

LARGEST = 20_000_000  # parameters; no float64 copy of a larger model is made
STEPS = (1e-6, 1e-7)  # decrease of the loss, relative to the loss, that the steps should bring
SAME = 1e-10  # largest relative difference of two computations of one loss
AGREE = 0.05  # largest relative difference of what the two steps show
NOISE = 1e-3  # of the weights, so that the loss has no kink where they begin
# Functions that turn a tensor into a number, or parameters into constants.
_CUTS = ("item", "tolist", "__float__", "requires_grad", "__set__")


@asks("gradient-differs")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return the decrease of the loss along its gradient, over the one that the gradient predicts.

    (L(θ − εg) − L(θ)) / (−ε‖g‖²), in float64, of the first batch; it tends to 1 with ε → 0 if g is
    the gradient of L. The weights θ are the initial ones with a little noise, which avoids kinks
    such as |0|. Also name the custom functions that the backward pass goes through.
    """
    if sum(p.numel() for p in setup.model.parameters()) > LARGEST:
        raise Untold("the model is large")
    if setup.differentiates:
        raise Untold("the loss computes gradients itself")
    with seeded(setup.seed), made_in_float64():
        fork = setup.fork()
        without_gradient_hooks(fork.model, fork.optimizer)  # `gradient-hooks` tells of these
        fork.model.double()
        fork.batches = [mapped(setup.batches[0], in_float64)]
        moved = [p for p in fork.model.parameters() if p.requires_grad]
        for p in moved:
            p.data += NOISE * torch.randn_like(p)
        if why := _why_not(fork, moved):
            raise Untold(why)
        return _compared(fork, moved)


def _why_not(fork: Fork, moved: Sequence[Tensor]) -> str:
    """Return why the loss may differ from what its gradient is meant to be of; "": it may not."""
    forwards = set(_forwards(Function))
    found: list[str] = []

    def look(call: Call) -> None:
        given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
        depends = any(x.requires_grad for x in given)
        if (is_cut(call, given) or call.name in _CUTS) and not _is_within(forwards):
            found.append(f"the gradient is cut on purpose: {call.place}")
        elif depends and isinstance(call.result, Tensor) and _is_short(call.result):
            found.append(f"it does not run in float64: {call.place}")

    try:
        with torch.enable_grad():
            see_calls(fork, look)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # not all of torch's functions have a float64 version
        found.append(f"it does not run in float64: {_first_line(error)}")
    if any(p.dtype != torch.float64 for p in moved):
        found.append("the parameters are not real numbers")
    return found[0] if found else ""


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _is_short(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def _compared(fork: Fork, moved: Sequence[Tensor]) -> Iterable[Fact]:
    with seeded(fork.seed), torch.enable_grad():
        repeated = RepeatedLoss(fork)
        loss = fork.loss(fork.model, copied(fork.batches[0]))
        before = float(loss.detach())
        try:
            gradients = torch.autograd.grad(loss, moved, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Untold(f"its backward pass fails in float64: {_first_line(error)}") from error
    pairs = [(p, p.detach().clone(), g.to_dense())
             for p, g in zip(moved, gradients, strict=True) if g is not None]  # fmt: skip
    square = sum(float(g.square().sum()) for *_, g in pairs)
    if not (math.isfinite(before) and 0 < square < math.inf):
        raise Untold("the loss or its gradient is not finite, or the gradient is zero")
    if abs(repeated.of(fork.batches[0]) - before) > SAME * abs(before):
        raise Untold("the loss is another one when it is computed again")
    ratios = []
    weights = sum(float(here.square().sum()) for _, here, _ in pairs)
    for step in STEPS:
        length = step * min((abs(before) or 1.0) / square, math.sqrt((weights or 1.0) / square))
        with torch.no_grad():
            for p, here, g in pairs:
                p.copy_(here - length * g)
        ratios.append((before - repeated.of(fork.batches[0])) / (length * square))
    ratio, shorter = ratios
    if not abs(ratio - shorter) < AGREE * max(1.0, abs(ratio)):
        raise Untold("steps of two lengths disagree")
    return (Fact(", ".join(_custom(loss)), {"ratio": shorter}),)


def _custom(loss: Tensor) -> list[str]:
    """Return the names of the custom functions, other than torch's, in the graph of a loss."""
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    names: dict[str, None] = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            own = type(node)._forward_cls  # type: ignore[attr-defined]
            if not own.__module__.startswith("torch."):
                names[own.__name__] = None
    return list(names)


def _forwards(of: Any) -> Iterator[CodeType]:
    """Yield the code of the forward passes of a custom function's subclasses."""
    for kind in of.__subclasses__():
        code = getattr(kind.forward, "__code__", None)
        if code is not None and kind.forward is not Function.forward:
            yield code
        yield from _forwards(kind)


def _is_within(forwards: set[CodeType]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None
