"""A training with a monitor, in which something goes wrong."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor import Monitor, StepReport
from adiv_monitor.rerun import eager
from adiv_monitor.rerun.surroundings import _rerun
from faults.scenarios import SCENARIOS, Scenario
from faults.world import Result, result, surroundings

REASON = "the fault that was put in"


class Fault(Exception):
    """What is raised on purpose."""


@dataclass
class Trial:
    """What came of it.

    Attributes:
        result: of the training; None where it did not get to its end.
        reports: of the monitor.
        warned: warnings of the fault.
        raised: what reached the training loop.
        left: hooks and modes that are not as they were before.
    """

    result: Result | None = None
    reports: list[StepReport] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    raised: BaseException | None = None
    left: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> list[str]:
        """Where the reports speak of the fault."""
        said = [r.notes + tuple(r.unsupported.values()) for r in self.reports]
        return [text for texts in said for text in texts if REASON in text]


Step = Callable[[nn.Module, Optimizer], Tensor]


def take(
    scenario: Scenario,
    fault: AbstractContextManager[object] | None = None,
    *,
    steps: int | None = None,
    step: Step | None = None,
    **options: Any,
) -> Trial:
    """Train with a monitor while the fault is there, then close the monitor."""
    model, optimizer = scenario.make()
    before = surroundings(model, optimizer)
    trial = Trial()
    monitor = Monitor(
        model,
        optimizer,
        **{"every_n_steps": 1, "on_error": "warn", **scenario.options(), **options},
    )
    with afterwards_clean(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with fault or nullcontext(), monitor:
                losses = list(_train(scenario, model, optimizer, steps, step))
            trial.result = result(model, optimizer, losses)
        except BaseException as error:
            trial.raised = error
        trial.left = changed(before, surroundings(model, optimizer))
    trial.reports = list(monitor.reports)
    trial.warned = [str(w.message) for w in warned if REASON in str(w.message)]
    return trial


def _train(
    scenario: Scenario, model: nn.Module, optimizer: Optimizer, steps: int | None, step: Step | None
) -> Iterator[Tensor]:
    for _ in range(scenario.steps if steps is None else steps):
        if step is not None:
            yield step(model, optimizer)
        else:
            yield scenario.step(model, optimizer, scenario.loss)


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was."""
    return {key: after.get(key) for key in before | after if before.get(key) != after.get(key)}


@cache
def unmonitored(name: str, steps: int | None = None) -> Result:
    """What the training gives without a monitor."""
    return trained(SCENARIOS[name], steps)


def trained(scenario: Scenario, steps: int | None = None, step: Step | None = None) -> Result:
    """What a training gives without a monitor."""
    model, optimizer = scenario.make()
    losses = list(_train(scenario, model, optimizer, steps, step))
    return result(model, optimizer, losses)


def forget_caches() -> None:
    """So that cached functions of the monitor run again."""
    for cached in _caches(len(sys.modules)):
        cached.cache_clear()


@cache
def _caches(modules: int) -> list[Any]:
    return [
        value
        for name, module in sys.modules.items()
        if name.startswith("adiv_monitor")
        for value in vars(module).values()
        if isinstance(value, _lru_cache_wrapper)
    ]


@contextmanager
def afterwards_clean() -> Iterator[None]:
    """What one trial leaves behind must not show in the next."""
    enabled = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(enabled)
        _rerun.depth = 0
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        eager._leave_all()
