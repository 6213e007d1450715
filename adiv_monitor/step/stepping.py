"""Optimizers: which object takes the steps, its learning rates, nested steps, steps of others."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from traceback import walk_stack
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.hook import remove, weakly
from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.failures import Failures

# After this many steps of other optimizers, without one of its own, an armed step is dropped.
_TOO_MANY = 3
_RISES = 3  # of a learning rate before it falls back: a schedule of steps has none


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
        of_groups: `lr` of each parameter group; empty if a group has none.
        groups: id of a parameter → number of its group; empty if there is one group only.
        told: what the report says of the optimizer besides.
        state: `state_of` the optimizer, as the step begins.
    """

    of_groups: Sequence[float | Tensor]
    groups: Mapping[int, int]
    told: Mapping[str, Any]
    state: object = None


_NO_SETTINGS = {"params", "lr", "min_lr"}


def learning_rates(optimizer: Optimizer) -> Rates:
    """Return the optimizer's present learning rates.

    A tensor is copied on its device, since a scheduler may write to it before it is read. The rates
    of an optimizer that only calls others, in its list `optimizers`, are theirs.
    """
    inside = getattr(optimizer, "optimizers", None)
    those = inside if isinstance(inside, list) and all(map(runs_hooks, inside)) else [optimizer]
    several = [group for each in those for group in each.param_groups]
    given = [group["lr"] for group in several if isinstance(group.get("lr"), Real | Tensor)]
    rates = [x.detach().clone() if isinstance(x, Tensor) else float(x) for x in given]
    is_uphill = all(group.get("maximize") is True for group in several)
    told = {"optimizer": type(optimizer).__name__, "maximize": is_uphill}
    numbered = enumerate(several if several[1:] else ())
    return Rates(
        rates if len(rates) == len(several) else (),
        {id(p): i for i, group in numbered for p in group["params"]},
        {**told, "settings": _settings(several)},
        state_of(optimizer),
    )


class RateFalls:
    """Counts how often the first group's rate falls below a half in one step, after some rises.

    A schedule that begins anew with its warm-up does so; cosines and cycles fall step by step.

    Attributes:
        count: the number of such steps so far.
    """

    def __init__(self) -> None:
        self.count, self._rises, self._last = 0, 0, 0.0

    def sees(self, optimizer: Optimizer) -> None:
        """Look at the rate of a step; one that is a tensor is not read."""
        if isinstance(given := optimizer.param_groups[0].get("lr"), float):
            rate = float(given)  # which may be numpy's
            self.count += rate < self._last / 2 and self._rises >= _RISES
            self._rises = 0 if rate < self._last else self._rises + (rate > self._last)
            self._last = rate


def state_of(optimizer: Optimizer) -> object:
    """Return the dictionary of the first parameter's state that holds a tensor; None: none does."""
    several = optimizer.state.values()
    return next((of for of in several if any(isinstance(x, Tensor) for x in of.values())), None)


def _settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for name in sorted(set.intersection(*map(set, groups)) - _NO_SETTINGS):
        of_groups = [group[name] for group in groups]
        if all(isinstance(x, Real) and not isinstance(x, bool) for x in of_groups):
            found[name] = tuple(map(float, of_groups))
        elif name == "betas":
            found |= {f"beta{i + 1}": tuple(float(x[i]) for x in of_groups) for i in (0, 1)}
    return found


def is_within_own_step(optimizer: Optimizer) -> bool:
    """Whether a hook of the optimizer is called by a step inside another step of the optimizer.

    A subclass's step may call its base class's, and torch runs all hooks around both. The result is
    read from the call stack: a step that raises runs no post-hook, which would break a counter.
    """
    kinds = type(optimizer).__mro__
    hooked = [c.__dict__["step"] for c in kinds if hasattr(c.__dict__.get("step"), "hooked")]
    if len(hooked) < 2:
        return False
    code = hooked[0].__code__  # torch's wrapper, the same for every step; may be compiled
    name = (code.co_name, code.co_filename)
    stack = (frame for frame, _ in walk_stack(sys._getframe()))
    frames = (f for f in stack if (f.f_code.co_name, f.f_code.co_filename) == name)
    return sum(frame.f_locals.get("self") is optimizer for frame in frames) > 1


@dataclass(eq=False)
class Others:
    """Follows the steps of all optimizers, by torch's global hooks.

    Steps within the monitor's own optimizer's step, and after it, are a part of it.

    Attributes:
        own: the monitor's optimizer; None: it has none, and other steps are of no interest.
        parameters: the parameters whose versions are compared before and after a step.
        failures: handler of exceptions.
        begun: number of all steps, of any optimizer, that have begun.
        writes: class names of the other optimizers that stepped, and how many of their steps wrote
            to the parameters.
    """

    own: Optimizer | None
    parameters: Sequence[Tensor]
    failures: Failures
    begun: int = 0
    writes: Counter[str] = field(default_factory=Counter)
    _drop: Callable[[], object] = list
    _before: list[int] | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._has_begun = self.own is None  # the monitor's optimizer

    def follow(self, overtaken: Callable[[], object]) -> None:
        """Put the hooks on; call `leave` afterwards, even if this raises.

        Args:
            overtaken: called once, if other optimizers take the steps.
        """
        self._drop = overtaken
        for register, body in (
            (register_optimizer_step_pre_hook, Others._begins),
            (register_optimizer_step_post_hook, Others._ends),
        ):
            # Weakly: torch keeps the hooks, also of a monitor that nobody closes.
            self._handles.append(register(partial(weakly(self._safely), body)))
        weakref.finalize(self, remove, self._handles).atexit = False

    def leave(self) -> None:
        """Remove the hooks."""
        self._drop = list
        remove(self._handles)

    def _safely(self, body: Callable[..., None], stepping: Optimizer, *args: Any) -> None:
        self.failures.safely(body, self, stepping)

    def _begins(self, stepping: Optimizer) -> None:
        self.begun += 1
        self._has_begun |= stepping is self.own
        self._before = None if self._has_begun else [*map(version, self.parameters)]

    def _ends(self, stepping: Optimizer) -> None:
        """Record a step; of one with another inside, only that one."""
        before, self._before = self._before, None
        if before is None:
            return
        name = type(stepping).__name__
        self.writes[name] += before != [*map(version, self.parameters)]
        if self.writes.total() >= _TOO_MANY:
            self._drop()
            own = type(self.own).__name__
            self.failures.warn(
                "overtaken",
                f"adiv_monitor: another optimizer ({name}) than the monitor's ({own}) trains the "
                "parameters. Nothing is measured until the monitor's optimizer steps again. "
                "Give the monitor the one that steps; of a wrapper, the one inside",
            )
