"""Does a function of zero slope stop the gradient?"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adiv_monitor.audit.experiments.calls import Call, see_calls
from adiv_monitor.audit.experiments.derived import PRODUCTS
from adiv_monitor.audit.experiments.questions import asks
from adiv_monitor.audit.training.batches import tensors
from adiv_monitor.audit.training.setup import Fork, Setup, seeded
from adiv_monitor.diagnosis.record import Fact

BATCHES = 4
SAMPLED = 1000  # entries whose values tell whether a function may be a step
FEWEST = 8  # entries of a clip; the ends of a range fit two entries of any function
MULTIPLIES = ("mul", "multiply", "__mul__", "__rmul__")
# Products, in which one argument may be weights that another network computes.
COMBINED = (*PRODUCTS, *MULTIPLIES, "conv1d", "conv2d", "conv3d")
LIKE = ("expand_as", "view_as", "reshape_as", "type_as")  # the second argument gives a shape
SCALES = (0.01, 1.0, 100.0)  # factors on the argument; no smooth function is flat near zero


@dataclass
class _Seen:
    """A call with the argument of its result's shape, and the gradients at both.

    Attributes:
        call: The call.
        given: The argument.
        argument: A copy of it.
        ends: The ends of the range to which entries are cut; None: more than that is done.
        gradient: The gradient at the result, if there is one.
        before: The gradient at the argument, on all ways to the loss.
    """

    call: Call
    given: Tensor
    argument: Tensor
    ends: tuple[float, float] | None
    gradient: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)


@asks("zero-slope")
def ask(setup: Setup, trained: Fork) -> Iterable[Fact]:
    """Return steps, which have no slope anywhere, and clips of what the last layer returns.

    A step counts if no gradient reaches its argument, on another way either.
    Of a clip, the entries count that the loss would pull back into its range: their share, among
    those with a gradient at its result, with the weights after training.
    """
    fork = setup.fork_like(trained)
    steps: dict[str, Fact] = {}
    clips: dict[str, tuple[int, int, Fact]] = {}
    for batch in setup.batches[:BATCHES]:
        for seen in _with_gradients(fork, batch):
            call, x, g = seen.call, seen.argument, seen.gradient[0]
            try:
                is_step, is_clip = _is_step(seen), _is_clip(seen, batch)
            except Exception:  # it may not run on another argument
                continue
            if is_step:
                steps.setdefault(call.place, Fact(call.place, {}, {"kind": "step"}))
            elif is_clip and seen.ends is not None:
                low, high = seen.ends
                told = Fact(call.place, {}, {"kind": "clip"})
                stuck = int((((x < low) & (g < 0)) | ((x > high) & (g > 0))).sum())
                before, count, told = clips.get(call.place, (0, 0, told))
                clips[call.place] = before + stuck, count + int(g.ne(0).sum()), told
    shares = [Fact(fact.place, {"share": stuck / count}, fact.words)
              for stuck, count, fact in clips.values() if count]  # fmt: skip
    return (*steps.values(), *shares)


def _with_gradients(fork: Fork, batch: Any) -> list[_Seen]:
    """Return calls whose result gets a gradient: possible steps, and clips of the outputs."""
    steps: list[_Seen] = []
    clips: list[_Seen] = []
    computed: list[Tensor] = []  # from parameters alone, as normalised weights are

    def is_weight(x: Tensor) -> bool:
        return (x.is_leaf and x.requires_grad) or any(x is other for other in computed)

    def look(call: Call) -> None:
        given = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
        weights = [is_weight(x) for x in given]
        if weights and all(weights) and isinstance(call.result, Tensor):
            computed.append(call.result)
        elif len(given) > 1 and any(weights):
            clips.clear()  # a layer, which is no step even if its weights are zero
            return
        if call.path is not None and call.name in COMBINED:
            computing = {id(x) for x in given if x.requires_grad}
            if len(computing) > 1:  # a layer whose weights another network computes
                clips.clear()
        try:
            seen = _candidate(call, given[:1] if call.name in LIKE else given)
        except Exception:  # a tensor of another kind, such as a nested one
            return
        if seen is not None:
            call.result.register_hook(seen.gradient.append)
            seen.given.register_hook(seen.before.append)  # type: ignore[no-untyped-call]
            (steps if seen.ends is None else clips).append(seen)

    with torch.enable_grad():
        see_calls(fork, look, batch).backward()  # type: ignore[no-untyped-call]
    fork.optimizer.zero_grad()
    return [seen for seen in (*steps, *clips) if seen.gradient and bool(seen.gradient[0].any())]


def _candidate(call: Call, given: list[Tensor]) -> _Seen | None:
    """Return a call that cuts its argument to a range, or has fewer values than it."""
    made = call.result
    if not isinstance(made, Tensor) or not made.requires_grad or made.numel() < 2:
        return None
    x = next((x for x in given if x.requires_grad and x.shape == made.shape), None)
    if x is None or x is made or made.is_complex() or x.is_complex():
        return None
    ends = clipped(x, made) if made.numel() >= FEWEST else None
    values = [len(torch.unique(a.detach().flatten()[:SAMPLED])) for a in (made, x)]
    if ends is None and values[0] >= values[1]:
        return None
    return _Seen(call, x, x.detach().clone(), ends)


def clipped(x: Tensor, made: Tensor) -> tuple[float, float] | None:
    """Return the ends of the range to which entries are cut; None: more than that is done."""
    low, high = (float(end) for end in torch.aminmax(made.detach()))
    if low == high:  # all entries are outside, on the same side
        return (low, high) if bool((x < low).all() or (x > high).all()) else None
    is_cut = torch.equal(made.detach(), x.detach().clamp(low, high))
    return (low, high) if is_cut and not torch.equal(made, x) else None


def _is_clip(seen: _Seen, batch: Any) -> bool:
    """Return whether entries are cut to a range. If all are the same, other arguments tell.

    A product with zero is zero for all of them. A product with labels of 0 and 1 cuts those outputs
    that happen to fit them.
    """
    if seen.ends is None or _is_product_with_one_of(batch, seen):
        return False
    low, high = seen.ends
    return low < high or any(bool((_again(seen, by)[0] != low).any()) for by in (-1.0, *SCALES))


def _is_product_with_one_of(batch: Any, seen: _Seen) -> bool:
    """Return whether an argument of a product has the values of a tensor of the batch."""
    others = [x for x in seen.call.args if isinstance(x, Tensor) and x is not seen.given]
    return seen.call.name in MULTIPLIES and any(
        x.shape == y.shape and torch.equal(x.float(), y.float())
        for x in others
        for y in tensors(batch)
    )


def _is_step(seen: _Seen) -> bool:
    """Return whether the function's result varies while its slope is zero, also near zero."""
    if any(bool(g.any()) for g in seen.before):
        return False
    varies = False
    for scale in SCALES:
        made, slope = _again(seen, scale)
        if slope is not None and bool(slope.any()):
            return False
        varies |= bool((made != made.flatten()[0]).any())
    return varies


def _again(seen: _Seen, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return the function's result for its argument times a factor, and its slope there."""
    x = (scale * seen.argument).requires_grad_()
    with seeded(0):
        made = seen.call.function(
            *(x if a is seen.given else a for a in seen.call.args),
            **{name: x if a is seen.given else a for name, a in seen.call.kwargs.items()},
        )
    weights = torch.linspace(1, 2, made.numel(), dtype=made.dtype, device=made.device)
    (slope,) = torch.autograd.grad((made.flatten() * weights).sum(), x, allow_unused=True)
    return made.detach(), slope
