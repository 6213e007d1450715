"""The optimizer that is followed: which one really steps, and where its steps begin and end."""

import sys
from collections.abc import Iterator
from numbers import Real
from types import FrameType

from torch import Tensor
from torch.optim import Optimizer


def stepping(optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer that steps and runs hooks, inside wrappers that merely hold it.

    Accelerate's and Lightning's wrappers do; one that runs hooks of its own has steps of its own.
    """
    inner = getattr(optimizer, "optimizer", None)
    if runs_hooks(optimizer) or not isinstance(inner, Optimizer):
        return optimizer
    return stepping(inner)


def runs_hooks(optimizer: object) -> bool:
    """Whether this is an optimizer that torch has made ready to run hooks around its steps."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


def learning_rates(optimizer: Optimizer) -> list[float | Tensor]:
    """`lr` of each parameter group as it is now; none where a group has none.

    Of what is on a device a copy is made there: a scheduler may write to it before it is read.
    """
    found: list[float | Tensor] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            found.append(rate.detach().clone())
        elif isinstance(rate, Real):
            found.append(float(rate))
        else:
            return []
    return found


def is_within_own_step(optimizer: Optimizer) -> bool:
    """Whether a hook of the optimizer was called by a step that another step of it has called.

    A subclass's step may call its base class's, and torch runs all hooks around both. Read from the
    call stack: a step that raises runs no hook at its end, so a count of steps would stay wrong.
    """
    hooked = [c.__dict__["step"] for c in type(optimizer).__mro__ if _is_hooked(c)]
    if len(hooked) < 2:
        return False
    code = hooked[0].__code__  # torch's wrapper, the same around every step; maybe compiled
    name = (code.co_name, code.co_filename)
    frames = (f for f in _stack() if (f.f_code.co_name, f.f_code.co_filename) == name)
    return sum(frame.f_locals.get("self") is optimizer for frame in frames) > 1


def _is_hooked(kind: type) -> bool:
    return hasattr(kind.__dict__.get("step"), "hooked")


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
