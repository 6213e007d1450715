"""What a measured step holds on to: up to the optimizer's step, and to the next forward pass."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import NextForward
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.room import FRAMES, Room
from adiv_monitor.capture.selection import Selection
from adiv_monitor.report import AlignmentReading, Turn
from adiv_monitor.rerun.eager import forced_eager
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.realised import Realised


class Armed:
    """A step to be measured, from before its forward pass to its end.

    Args:
        capture: its rows.
        step: what is measured of it.
        selection: which parameters.
        turn: whose turn that is.
        guard: knows whether watching it has failed.
        others: counts the steps of other optimizers.
        hooks: what else sees its forward passes.
    """

    def __init__(
        self,
        capture: Capture,
        step: MeasuredStep,
        selection: Selection,
        turn: Turn | None,
        guard: Guard,
        others: Others,
        hooks: Sequence[Realised | LossHook],
    ) -> None:
        self.capture = capture
        self.step = step
        self.selection = selection
        self.turn = turn
        self.guard = guard
        self.others = others
        self._hooks = hooks
        self._eager = forced_eager()
        self.learning_rates: Sequence[float | Tensor] = ()
        self.attempts = 0  # at the optimizer's step: one that raises may be repeated
        self.closure_calls: int | None = None  # during the last one; None: it had no closure

    def attach(self) -> None:
        """Put the hooks on; whatever comes of that, `release` takes them off."""
        self._eager.__enter__()
        self.others.follow()
        for hook in self._hooks:
            hook.put_on()
        self.capture.attach()

    def release(self) -> None:
        """Take the hooks off; if that is interrupted, it can be done again."""
        hooks = (hook.remove for hook in self._hooks)
        call_all(self.capture.detach, *hooks, self._eager.leave, self.others.leave)

    def gradients_final(self, stepping: Optimizer) -> None:
        """The gradients are what the optimizer will use."""
        # A fused optimizer unscales AMP gradients itself; the scaler leaves the scale here.
        scale = getattr(stepping, "grad_scale", None)
        found_inf = getattr(stepping, "found_inf", None)
        self.step.skipped = found_inf if isinstance(found_inf, Tensor) else None
        self.step.gradient_is_final(scale if isinstance(scale, Tensor) else 1.0, steps=True)


class Pending:
    """A measured step that waits for the next forward pass."""

    def __init__(
        self,
        step: MeasuredStep,
        capture: Capture,
        selection: Selection,
        turn: Turn | None,
        number: int,
        alignment: Mapping[str, AlignmentReading],
        learning_rates: Sequence[float | Tensor],
    ) -> None:
        self.step = step
        self.capture = capture
        self.selection = selection
        self.turn = turn
        self.number = number
        self.alignment = alignment
        self.learning_rates = learning_rates
        self._hooks: list[NextForward] = []
        self.room = Room()  # as deep as that forward pass may be, its report is completed

    def wait(self, hook: NextForward) -> None:
        """For a forward pass."""
        self._hooks.append(hook)
        self.room.make(FRAMES)
        hook.put_on()

    def release(self) -> None:
        """Take the hooks off."""
        call_all(*(hook.remove for hook in self._hooks))
