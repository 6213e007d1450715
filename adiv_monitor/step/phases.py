"""State of a measured step: up to the optimizer's step, and up to the next forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import NextForward
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import AlignmentReading, Turn
from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.probing import ProbeStep
from adiv_monitor.step.stepping import NO_RATES, Rates


@dataclass(eq=False)
class Armed:
    """A step to be measured, from before its forward pass to its end.

    Attributes:
        capture: captures its rows.
        step: computes its sums.
        selection: the parameters to measure.
        turn: the turn, if layers are measured in turn.
        guard: records whether watching it has failed.
        others: counts the steps of other optimizers.
        hooks: other hooks on its forward passes.
        rates: the optimizer's learning rates.
        attempts: number of optimizer steps so far: one that raises may be repeated.
        closure_calls: number of calls during the last attempt; None: without a closure.
    """

    capture: Capture
    step: MeasuredStep
    selection: Selection
    turn: Turn | None
    guard: Guard
    others: Others
    hooks: Sequence[ProbeStep | LossHook]
    rates: Rates = field(default=NO_RATES, init=False)
    attempts: int = field(default=0, init=False)
    closure_calls: int | None = field(default=None, init=False)
    _eager: forced_eager = field(default_factory=forced_eager, init=False)

    def attach(self) -> None:
        """Attach the hooks; call `release` afterwards, even if this raises."""
        self._eager.__enter__()
        self.others.follow()
        for hook in self.hooks:
            hook.put_on()
        self.capture.attach()

    def release(self) -> None:
        """Remove the hooks; after an interrupt, it can be called again."""
        hooks = (hook.remove for hook in self.hooks)
        call_all(self.capture.detach, *hooks, self._eager.leave, self.others.leave)

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


@dataclass(eq=False)
class Pending:
    """A measured step that waits for the next forward pass.

    Attributes:
        armed: the step, with its hooks removed.
        selection: its parameters, as the optimizer's step left them.
        number: its number.
        alignment: the alignments that were read after it.
    """

    armed: Armed
    selection: Selection
    number: int
    alignment: Mapping[str, AlignmentReading]
    _hooks: list[NextForward] = field(default_factory=list, init=False)

    def wait(self, hook: NextForward) -> None:
        """Attach a hook that waits for a forward pass."""
        self._hooks.append(hook)
        hook.put_on()

    def release(self) -> None:
        """Remove the hooks."""
        call_all(*(hook.remove for hook in self._hooks))
