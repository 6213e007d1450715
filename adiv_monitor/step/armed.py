"""A step that is measured, from before its forward pass to its report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import AlignmentReading, Turn
from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.rerun.thread import surely
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.probing import ProbeStep
from adiv_monitor.step.stepping import NO_RATES, Rates


@dataclass(eq=False)
class Armed:
    """A step to be measured.

    Attributes:
        number: its number.
        capture: captures its rows.
        step: computes its sums.
        selection: the parameters to measure; after the step, as it left them.
        turn: the turn, if layers are measured in turn.
        guard: records whether watching it has failed.
        others: follows the steps of other optimizers.
        hooks: other hooks on its forward passes.
        rates: the optimizer's learning rates.
        attempts: number of optimizer steps so far: one that raises may be repeated.
        closure_calls: number of calls during the last attempt; None: without a closure.
        overtaken: number of steps of other optimizers after its forward pass.
        alignment: the alignments that were read after it.
    """

    number: int
    capture: Capture
    step: MeasuredStep
    selection: Selection
    turn: Turn | None
    guard: Guard
    others: Others
    hooks: Sequence[ProbeStep | LossHook]
    rates: Rates = NO_RATES
    attempts: int = 0
    closure_calls: int | None = None
    overtaken: int = 0
    alignment: Mapping[str, AlignmentReading] = field(default_factory=dict)
    _off: list[Callable[[], object]] = field(default_factory=list, init=False)  # may be repeated

    def attach(self) -> None:
        """Put the hooks on; call `release` afterwards, even if this raises."""
        eager = forced_eager()
        self._off.append(eager.leave)
        eager.__enter__()
        self._off.append(self.others.leave)
        self.others.follow()
        for hook in self.hooks:
            self._off.append(hook.remove)
            hook.put_on()
        self._off.append(self.capture.detach)
        self.capture.attach()

    def release(self) -> None:
        """Take everything off; after an interrupt, this can be called again."""
        surely(call_all, *reversed(self._off))
        self._off.clear()

    def gradients_final(self, stepping: Optimizer) -> None:
        """Read the gradients, which are now those that the optimizer will use."""
        # A fused optimizer unscales AMP gradients itself; the scaler leaves the scale here.
        scale = getattr(stepping, "grad_scale", None)
        found_inf = getattr(stepping, "found_inf", None)
        self.step.gradient_is_final(
            steps=True,
            scale=scale if isinstance(scale, Tensor) else None,
            skipped=found_inf if isinstance(found_inf, Tensor) else None,
        )

    def await_batch(self) -> None:
        """Look at the batch of the next training forward pass; see `StepReport.next_batch`."""
        if self.capture.watching.first is not None:
            hooks = GlobalHooks(None, self._ran)
            self._off.append(hooks.remove)
            hooks.put_on()

    def _ran(self, module: nn.Module, args: Any, *more: Any) -> None:
        if (
            module is not self.capture.watching.first
            or not more[1:]
            or reruns()
            or not trains(args)
        ):
            return
        if module.training and torch.is_grad_enabled():
            self.guard(self.capture.next_ran, args, more[0])
            self.release()
