"""The followed optimizer: which object takes the steps, its learning rates, nested steps."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


def stepping(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer that steps and runs hooks, from inside wrappers that only hold it.

    Accelerate and Lightning have such wrappers. A wrapper that runs hooks itself has its own steps.
    """
    inner = getattr(optimizer, "optimizer", None)
    if runs_hooks(optimizer) or not isinstance(inner, Optimizer):
        return optimizer
    return stepping(inner)


def runs_hooks(optimizer: object) -> bool:
    """Whether an object is an initialized torch optimizer, which runs hooks around its steps."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer)


class Rates(NamedTuple):
    """The learning rates of a step.

    Attributes:
        optimizer: class name of the optimizer; "" without one.
        of_groups: `lr` of each parameter group; empty if a group has none.
        groups: id of a parameter → number of its group; empty if there is one group only.
        maximize: whether all groups have `maximize=True`.
        settings: see `StepReport.settings`.
        has_state: whether the optimizer holds a tensor in its state, as the step begins.
    """

    optimizer: str
    of_groups: Sequence[float | Tensor]
    groups: Mapping[int, int]
    maximize: bool = False
    settings: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    has_state: bool = False


_NO_SETTINGS = {"params", "lr", "initial_lr", "max_lr", "min_lr"}
NO_RATES = Rates("", (), {})


def learning_rates(optimizer: Optimizer) -> Rates:
    """Return the optimizer's present learning rates.

    A tensor is copied on its device, since a scheduler may write to it before it is read.
    """
    several = optimizer.param_groups
    rates = [_own(group["lr"]) for group in several if isinstance(group.get("lr"), Real | Tensor)]
    return Rates(
        type(optimizer).__name__,
        rates if len(rates) == len(several) else (),
        {
            id(p): i
            for i, group in enumerate(several if several[1:] else ())
            for p in group["params"]
        },
        all(group.get("maximize") is True for group in several),
        _settings(several),
        has_state(optimizer),
    )


def has_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds a tensor in its state."""
    held = (value for of in optimizer.state.values() for value in of.values())
    return any(isinstance(value, Tensor) for value in held)


def _settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for name in sorted(set.intersection(*map(set, groups)) - _NO_SETTINGS):
        of_groups = [group[name] for group in groups]
        if all(isinstance(x, Real) and not isinstance(x, bool) for x in of_groups):
            found[name] = tuple(map(float, of_groups))
        elif name == "betas":
            found |= {f"beta{i + 1}": tuple(float(x[i]) for x in of_groups) for i in (0, 1)}
    return found


def _own(rate: Any) -> float | Tensor:
    return rate.detach().clone() if isinstance(rate, Tensor) else float(rate)


def is_within_own_step(optimizer: Optimizer) -> bool:
    """Whether a hook of the optimizer is called by a step inside another step of the optimizer.

    A subclass's step may call its base class's, and torch runs all hooks around both. The result is
    read from the call stack: a step that raises runs no post-hook, which would break a counter.
    """
    hooked = [c.__dict__["step"] for c in type(optimizer).__mro__ if _is_hooked(c)]
    if len(hooked) < 2:
        return False
    code = hooked[0].__code__  # torch's wrapper, the same for every step; may be compiled
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
