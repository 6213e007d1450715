"""A step that is measured, from before its forward pass to its report, and what it is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.check import Check
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import GlobalHooks, trains
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.trace import Trace
from adiv_monitor.report import AlignmentReading, Turn
from adiv_monitor.rerun.eager import forced_eager, in_compiled_code
from adiv_monitor.rerun.surroundings import reruns
from adiv_monitor.rerun.thread import surely
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import NO_RATES, Rates
from adiv_monitor.step.training import Training
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.step.probing import ProbeStep


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
        dropout: the largest rate of the model's dropout modules.
        attempts: number of optimizer steps so far: one that raises may be repeated.
        closure_calls: number of calls during the last attempt; None: without a closure.
        alignment: the alignments that were read after it.
    """

    number: int
    capture: Capture
    step: MeasuredStep
    selection: Selection
    turn: Turn | None
    guard: Guard
    others: Others
    hooks: "Sequence[ProbeStep | LossHook]"
    rates: Rates = NO_RATES
    dropout: float = 0.0
    attempts: int = 0
    closure_calls: int | None = None
    alignment: Mapping[str, AlignmentReading] = field(default_factory=dict)
    _off: list[Callable[[], object]] = field(default_factory=list, init=False)  # may be repeated

    def attach(self) -> None:
        """Put the hooks on; call `release` afterwards, even if this raises."""
        eager = forced_eager()
        hooks: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (eager.__enter__, eager.leave),
            (partial(self.others.follow, self._drop), self.others.leave),
            *((hook.put_on, hook.remove) for hook in self.hooks),
            (self.capture.attach, self.capture.detach),
        ]
        for on, off in hooks:
            self._off.append(off)
            on()

    def release(self) -> None:
        """Take everything off; after an interrupt, this can be called again."""
        surely(call_all, *reversed(self._off))
        self._off.clear()

    def _drop(self) -> None:
        self.guard.broken = True
        self.release()

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


class Steps:
    """Makes the steps to be measured.

    Args:
        training: the training, and what is measured in it.
        generator: the monitor's own random generator.
        schedule: says whose turn it is, and times measured steps.
        failures: handler of exceptions.
        history: what the run has shown so far.
        loss: reads losses in measured steps; None: it is not needed.

    Attributes:
        compiled: whether compiled code called the model in the last measured step.
    """

    def __init__(
        self,
        training: Training,
        generator: np.random.Generator,
        schedule: Schedule,
        failures: Failures,
        history: RunHistory,
        loss: LossHook | None,
    ) -> None:
        self.compiled = False
        self._training = training
        self._generator = generator
        self._schedule = schedule
        self._failures = failures
        self._history = history
        self._loss = loss
        self._trace = Trace()
        self._probe: Callable[[Selection], ProbeStep] | None = None
        if measures := training.on_probe:
            from adiv_monitor.step import probing

            given = measures, training.max_rows, generator, failures.tell
            probe = probing.Probing(training.model, training.probe_loss, *given)
            self._probe = partial(probing.ProbeStep, probe)

    def next(self, number: int, agree: Callable[[str], bool]) -> Armed:
        """Prepare the coming step, without attaching any hooks yet.

        Args:
            number: its number.
            agree: asks the other ranks whether all of them reach a point of the step.
        """
        training, history, failures = self._training, self._history, self._failures
        selection, turn = training.due(self._schedule.turns)
        guard = Guard(failures.lost)
        others = Others(training.optimizer, selection.parameters, failures)
        plan = self._trace.plan(selection)
        context = Context(
            guard,
            fail=failures.switch_off,
            switched_off=failures.switched_off,
            checked=history.checked_rules,
            begins=self._forward_begins,
            passes=Passes(guard, lambda: others.begun),
            attainable=training.attainable,
            check=Check(partial(history.asks, surveys=plan is None)),
        )
        chooser, pieces = Chooser(training.max_rows, self._generator), self._trace.pieces
        capture = Capture(training.model, selection, chooser, context, plan, pieces)
        probe = None if self._probe is None else self._probe(selection)
        step = MeasuredStep(
            capture,
            history,
            fail=failures.switch_off,
            generator=self._generator,
            probe=probe,
            agree=agree,
            whole=WholeModel(training.model, training.trained, history),
        )
        hooks = [each for each in (probe, self._loss) if each is not None]
        return Armed(number, capture, step, selection, turn, guard, others, hooks)

    def learn(self, capture: Capture) -> None:
        """Learn from a step that was taken."""
        capture.tell(self._trace)

    def _forward_begins(self) -> None:
        self._failures.safely(self._schedule.forward_begins)
        self.compiled = in_compiled_code()
