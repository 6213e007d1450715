"""The life of a measured step, in four events; between measured steps it does nothing.

- armed: `arm`, before the step's forward pass, puts hooks on (`Armed`). When a module runs,
  `capture/catch.py` makes a `Call`, with Φ and z; in the backward pass the call gets G.
- gradient is final: `step_begins`, or once the optimizer has called its closure.
  `MeasuredStep.gradient_is_final` gets `LayerRows` from `Capture.finish`, and computes e:
  `LayerInProgress`.
- stepped: `step_ends`, also from `end_step` without an optimizer. `MeasuredStep.updated` computes
  d. All hooks are off, but one waits for the next batch.
- read: `read`, as the next step begins or somebody asks. `MeasuredStep.contribution` makes one
  transfer to the host: `StepSums`, in a `RankContribution`. Once all ranks have sent theirs,
  `Assembly` calls `understand`: a `LayerReading` each, in the `StepReport`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.check import Check
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.trace import Trace
from adiv_monitor.report import StepReport
from adiv_monitor.rerun.eager import in_compiled_code
from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.armed import Armed
from adiv_monitor.step.assembly import Assembly
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.loss_log import LossLog
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.outcome import understand
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import NO_RATES, Others, learning_rates
from adiv_monitor.step.training import Training
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.alignment.instrument import Alignment
    from adiv_monitor.step.probing import ProbeStep

Stepping = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of an optimizer's step


class StepController:
    """Controller of measured steps, from before their forward passes to their reports.

    Args:
        training: the training, and what is measured in it.
        generator: the monitor's own random generator.
        schedule: schedule that times measured steps.
        failures: handler of exceptions.
        now: returns the number of the current step.
        report: called with every report, and whether this rank is to write it.

    Attributes:
        assembly: makes the reports, with the other ranks.
        losses: log of the losses of the steps so far.
    """

    def __init__(
        self,
        training: Training,
        generator: np.random.Generator,
        schedule: Schedule,
        failures: Failures,
        now: Callable[[], int],
        report: Callable[[StepReport, bool], None],
    ) -> None:
        self._training = training
        self._generator = generator
        self._schedule = schedule
        self._failures = failures
        self._now = now
        self.losses = LossLog()
        self.assembly = Assembly(training.max_rows, generator, self._complete, report)
        self._alignment: Alignment | None = None
        self._reference: dict[str, Any] | None = None  # of a run that is resumed
        self._history = RunHistory()
        self._loss: LossHook | None = None
        if (loss := training.seen_loss) is not None:
            fail = partial(failures.tell, "the loss")
            self._loss = LossHook(loss, training.model, self._sees_loss, fail)
        self._trace = Trace()
        self._probe: Callable[[Selection], ProbeStep] | None = None
        if measures := training.on_probe:
            from adiv_monitor.step import probing

            given = measures, training.max_rows, generator, failures.tell
            probe = probing.Probing(training.model, training.probe_loss, *given)
            self._probe = partial(probing.ProbeStep, probe)
        self._is_compiled = (
            False  # whether compiled code called the model in the last measured step
        )
        self._armed: Armed | None = None
        self._taken: Armed | None = None  # the step that was taken, until it is read

    # --- the run ----------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Arm the first step; `name` is the same in all ranks."""
        safely, training, number = self._failures.safely, self._training, self._now()
        if self._loss is not None and self._loss.stays:
            safely(self._loss.put_on)
        safely(self.assembly.join, name)
        safely(self._schedule.begin, number, next(training.model.parameters()), name)
        safely(self._refer)
        safely(self.arm)

    def _refer(self) -> None:
        """Make the present state the reference point of alignments."""
        if self._training.alignment is not None:
            from adiv_monitor.alignment.instrument import Alignment

            self._alignment = Alignment(self._training.model, self._training.alignment)
            if self._reference is not None:
                self._alignment.load_state_dict(self._reference)

    def reference(self) -> dict[str, Any] | None:
        """Return the reference point of alignments, for a resumed run."""
        return self._reference if self._alignment is None else self._alignment.state_dict()

    def resume(self, reference: dict[str, Any] | None) -> None:
        """Set the reference point of alignments; call this before `begin`."""
        self._reference = reference

    def _sees_loss(self, loss: Tensor) -> None:
        self.losses.add(self._now(), loss, is_said=False)
        if self._armed is not None:
            self._armed.capture.passes.follow(loss)

    def end(self, patience: float | None) -> None:
        """Complete the report, as the monitor is closed.

        Args:
            patience: largest time to wait for other ranks, in seconds; None: the default.
        """
        self.assembly.ends(patience)
        call_all(self.read, self.assembly.leave, self._schedule.end)

    def release(self) -> None:
        """Remove the hooks, and drop the current step and copies, whatever has failed before."""
        taken, self._taken = self._taken, None
        call_all(self.disarm, *([] if taken is None else [taken.release]))
        self._history.flats.clear()

    def leave(self) -> None:
        """Remove every hook, also that on the loss; it can be called again."""
        call_all(self.release, *([] if self._loss is None else [self._loss.remove]))

    def unstepped(self) -> str:
        """Return why the armed step was not measured although layers were called, or ""."""
        armed = self._armed
        if armed is None or armed.guard.broken or not armed.capture.saw_calls():
            return ""
        if self._training.optimizer is None:
            return (
                "the model ran, but the monitor saw no call of end_step(), so there is no report: "
                "give it the optimizer that trains the model"
            )
        return (
            "no step of the monitor's optimizer was taken while the monitor was on, so nothing was "
            "measured (were the backward passes too few for an accumulation, were all steps "
            "skipped, or does another optimizer train the model?)"
        )

    # --- armed ------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Attach the hooks, before the forward pass of the current step."""
        self.disarm()
        self._armed = armed = self._prepared()
        try:
            armed.attach()
        except BaseException:
            self.disarm()
            raise

    def _prepared(self) -> Armed:
        """Prepare the coming step, without attaching any hooks yet."""
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
            agree=self._agree,
            whole=WholeModel(training.model, training.trained, history),
        )
        loss = None if self._loss is None or self._loss.stays else self._loss
        hooks = [each for each in (probe, loss) if each is not None]
        return Armed(self._now(), capture, step, selection, turn, guard, others, hooks)

    def _forward_begins(self) -> None:
        self._failures.safely(self._schedule.forward_begins)
        self._is_compiled = in_compiled_code()

    def disarm(self) -> None:
        """Remove the hooks."""
        if self._armed is not None:
            self._armed.release()
            self._armed = None

    def _agree(self, point: str) -> bool:
        """Whether all ranks, including this one, participate in this point of the step."""
        attempt = 0 if self._armed is None else self._armed.attempts
        return self.assembly.agree(self._now(), f"{attempt}/{point}")

    # --- the gradient is final --------------------------------------------------------------------

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Stepping | None:
        """Read the last measured step; if this one is measured, read its gradient.

        Returns:
            The arguments of the optimizer's step with another closure; None: as they are.
        """
        self.losses.step_begins()
        self._failures.safely(self.read)
        armed = self._armed
        if armed is None or armed.guard.broken:
            return None
        armed.attempts += 1
        armed.rates = self._failures.safely(learning_rates, optimizer) or NO_RATES
        armed.dropout = self._training.dropout
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            armed.closure_calls = None
            armed.gradients_final(optimizer)
            return None
        armed.closure_calls = 0
        before = [*map(version, armed.selection.parameters)]

        def closure_then_read(*args: Any, **kwargs: Any) -> Any:
            if armed.closure_calls:  # several calls are refused: no more rows are needed
                self._failures.safely(armed.capture.detach)
            result = closure(*args, **kwargs)
            armed.closure_calls = (armed.closure_calls or 0) + 1
            if armed.closure_calls == 1:
                now = [*map(version, armed.selection.parameters)]
                armed.step.moved = now != before
                self._failures.safely(armed.gradients_final, optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_then_read, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_read}

    # --- stepped ----------------------------------------------------------------------------------

    def step_ends(self) -> None:
        """Measure the update; without an optimizer, the gradient is complete now, and is read."""
        self.losses.step_ends()
        armed = self._armed
        if armed is None:
            return
        try:
            if not armed.guard.broken:
                self._failures.safely(self._stepped, armed)
        finally:
            self.disarm()

    def _stepped(self, armed: Armed) -> None:
        """Measure the parameters' update; the rest waits until the next step begins."""
        has_optimizer, notes = self._training.optimizer is not None, self._failures.notes
        if not has_optimizer:
            armed.step.gradient_is_final(steps=False)
        self.disarm()
        armed.capture.tell(self._trace)
        if armed.closure_calls not in (None, 1):
            notes.append(
                f"Step {armed.number} was not measured: the optimizer evaluated its closure "
                f"{armed.closure_calls} times, so no single gradient belongs to its update."
            )
            self._failures.warn("closure", f"adiv_monitor: {notes[-1]}")
            armed.step.discard()
        elif has_optimizer:
            armed.step.updated()
        if self._alignment is not None:
            armed.alignment = self._failures.safely(self._alignment.read) or {}
        held = self._training.trained()
        if not armed.selection.knows(held):
            notes.append(
                "Parameters became trainable after the step was prepared: they are not in this "
                "report."
            )
        armed.selection = armed.selection.stepped(held)
        self._taken = armed
        if not has_optimizer:
            self.read()
        elif not self._is_compiled:  # a hook would become part of the compiled code
            armed.await_batch()

    # --- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Complete the report of the step that was taken, with those of the other ranks."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        taken.release()
        taken.step.applied()
        part = taken.step.contribution(taken.number)
        self._history.checked_rules.update(part.checked)
        self._failures.switched_off |= part.misdescribed
        taken.describe(part, self._failures, self._schedule.interval)
        # Last: losses that are taken are in no later report, even if this one fails.
        part.report = replace(part.report, losses=self.losses.take(taken.number))
        for path, reason in part.misdescribed.items():
            self._failures.warn(path, f"adiv_monitor: layer '{path}' is not measured: {reason}")
        self.assembly.add(part)

    def _complete(self, part: RankContribution) -> StepReport:
        """Return the report of a step, of one rank or of all."""
        report = understand(part, self._history)
        if self._loss is not None and not report.losses:
            report = replace(report, notes=(*report.notes, self._loss.unseen))
        return report
