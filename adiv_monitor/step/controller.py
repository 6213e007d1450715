"""Control of a measured step, from its hooks to its report.

The events of a step, what handles them, and what holds a layer afterwards:

    before the forward pass    `arm` puts hooks on the modules
    a module runs              `capture/gathering.py`, `Gathering.use`: a `Call`, with Φ and z
    the backward pass          `Gathering._on_gradient`, `Accumulation._after`: the call has G
    the optimizer's step       `step_begins` → `MeasuredStep.gradient_is_final`: `Capture.finish`
        begins                 gives `CapturedLayer`; `FinalGradient.begin` computes e:
                               `LayerInProgress`
        ends                   `step_ends` → `MeasuredStep.updated` computes d: `LayerSums`
    the next forward pass      `finish` → `MeasuredStep.contribution`: one transfer to the host;
        begins                 `RankContribution` has the `LayerSums` of all layers
    all ranks have sent theirs `Assembly` → `description.report_of` → `outcome.understand`: a
                               `LayerReading` each, in the `StepReport`
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import NextForward
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.loss_hook import LossHook, LossOf
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.selection import Selection, trainable
from adiv_monitor.capture.trace import Plan, Trace
from adiv_monitor.capture.world import world_size
from adiv_monitor.report import AlignmentReading, StepReport, Turn
from adiv_monitor.rerun.eager import in_compiled_code
from adiv_monitor.rerun.thread import surely
from adiv_monitor.step.assembly import Assembly
from adiv_monitor.step.description import describe, report_of
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.loss_log import LossLog
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.phases import Armed, Pending
from adiv_monitor.step.probing import ProbeStep, Probing
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import NO_RATES, learning_rates
from adiv_monitor.step.whole_model import WholeModel

# After this many steps of other optimizers, without one of its own, the followed one is replaced.
_OTHERS = 3


@dataclass(frozen=True)
class Asked:
    """The `Monitor` options that select the measurements of a step."""

    max_rows: int | None
    attainable: bool
    attention: bool
    realised: bool | LossOf
    alignment: Probe | None = None
    stops: bool = False
    loss: LossOf | None = None

    def probe_loss(self) -> LossOf | None:
        """Return the loss on the probe, if it is known."""
        return self.loss if isinstance(self.realised, bool) else self.realised

    def on_probe(self) -> list[str]:
        """Return what is measured on the probe."""
        asked = {"realised": self.realised is not False, "attention": self.attention}
        return [name for name, is_asked in asked.items() if is_asked]


@dataclass(frozen=True)
class Followed:
    """The training whose steps are measured.

    Attributes:
        model: the model.
        optimizer: the optimizer whose steps are measured; None: only gradients are measured.
        select: returns the parameters to measure in the coming step, and the turn.
        loss: hook that reads the losses of measured steps, if it is attached only during these.
    """

    model: nn.Module
    optimizer: Optimizer | None
    select: Callable[[], tuple[Selection, Turn | None]]
    loss: LossHook | None = None

    def trained(self) -> Iterable[Tensor]:
        """Return the parameters that are trained, or would be if they were not frozen."""
        if self.optimizer is None:
            return trainable(self.model)
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class StepController:
    """Controller of measured steps, from before their forward passes to their reports.

    Args:
        followed: the training.
        asked: the selected measurements.
        generator: the monitor's own random generator.
        schedule: schedule that times measured steps.
        failures: handler of exceptions.
        report: called with every report, and whether this rank is to write it.
        losses: log of the losses of the steps so far.

    Attributes:
        given_up: the armed step was dropped because other optimizers took the steps.
    """

    def __init__(
        self,
        followed: Followed,
        asked: Asked,
        generator: np.random.Generator,
        schedule: Schedule,
        failures: Failures,
        report: Callable[[StepReport, bool], None],
        losses: LossLog,
    ) -> None:
        self.given_up = False
        self._followed = followed
        self._asked = asked
        self._generator = generator
        self._schedule = schedule
        self._failures = failures
        self._losses = losses
        self._history = RunHistory()
        self._probing: Probing | None = None
        if measures := asked.on_probe():
            given = measures, asked.max_rows, generator, failures.tell
            self._probing = Probing(followed.model, asked.probe_loss(), *given)
        self._trace = Trace()
        self._assembly = Assembly(
            asked.max_rows, generator, self._complete, report, at_once=asked.stops
        )
        self._checked: set[str] = set()  # layers whose rule has been verified
        self._compiled = False  # whether compiled code called the model in the last measured step
        self._number = 0  # number of the current step
        self._patience = _OTHERS
        self._armed: Armed | None = None
        self._pending: Pending | None = None
        self._alignment: Alignment | None = None
        self._reference: dict[str, Any] | None = None

    def saw_calls(self) -> bool:
        """Whether layers have been called in an armed step that has not been taken yet."""
        return self._armed is not None and self._armed.capture.saw_calls()

    def unstepped(self) -> str:
        """Return why the armed step was not measured although layers were called, or ""."""
        armed = self._armed
        if armed is None or not armed.capture.saw_calls():
            return ""
        if self._followed.optimizer is None:
            return (
                "the model ran, but the monitor saw no call of end_step(), so there is no report: "
                "give it the optimizer that trains the model"
            )
        passes = armed.capture.forward_passes()
        what, why = "optimizer step", "were they too few for an accumulation, or all skipped?"
        if armed.others.steps:
            what = "step of the monitor's optimizer"
            why = f"another optimizer, {armed.others.last}, trains the model: monitor that one"
        seen = "1 forward pass with gradients was seen"
        if passes > 1:
            seen = f"{passes} forward passes with gradients were seen"
        return (
            f"no {what} was taken while the monitor was on, so nothing was measured ({seen}; {why})"
        )

    def sees_loss(self, loss: Tensor) -> None:
        """Follow the backward passes of a loss, if the step is measured."""
        if self._armed is not None:
            self._armed.capture.passes.follow(loss)

    def join(self, name: str) -> None:
        """Join the monitors of other ranks, so that reports cover all ranks that have one.

        Args:
            name: name of the measured model, the same in all ranks.
        """
        self._assembly.join(name)

    def refer(self) -> None:
        """Make the present state the reference point of alignments."""
        if self._asked.alignment is not None:
            self._alignment = Alignment(self._followed.model, self._asked.alignment)
            if self._reference is not None:
                self._alignment.load_state_dict(self._reference)

    def reference(self) -> dict[str, Any] | None:
        """Return the reference point of alignments, for a resumed run."""
        return self._reference if self._alignment is None else self._alignment.state_dict()

    def resume(self, reference: dict[str, Any] | None) -> None:
        """Set the reference point of alignments; call this before `refer`."""
        self._reference = reference

    def _aligned(self) -> Mapping[str, AlignmentReading]:
        """Return the present alignment readings; empty if alignment was not requested."""
        return {} if self._alignment is None else self._alignment.read()

    def arm(self) -> None:
        """Attach the hooks, before the forward pass of a step to measure."""
        try:
            self.disarm()
            self.given_up = False
            self._armed = self._next()
            self._armed.attach()
        except BaseException:
            self.disarm()
            raise

    def _next(self) -> Armed:
        """Prepare the coming step, without attaching any hooks yet."""
        selection, turn = self._followed.select()
        guard = Guard(self._failures.lost)
        others = Others(
            self._followed.optimizer, selection.parameters, self._awaits_step, self._failures.safely
        )
        context = Context(
            guard,
            fail=self._failures.switch_off,
            switched_off=self._failures.switched_off,
            checked=self._checked,
            begins=partial(self._failures.safely, self._look),
            renew=partial(self._failures.safely, self._renew),
            passes=Passes(guard, lambda: others.begun),
            attainable=self._asked.attainable,
        )
        capture = Capture(
            self._followed.model,
            selection,
            self._chooser(selection),
            context,
            plan=self._plan(selection),
            pieces=self._trace.pieces,
        )
        probe = None if self._probing is None else ProbeStep(self._probing, selection)
        step = MeasuredStep(
            capture,
            self._history,
            fail=self._failures.switch_off,
            generator=self._generator,
            probe=probe,
            agree=self._agree,
            whole=WholeModel(self._followed.model, self._followed.trained, self._history),
        )
        hooks = [each for each in (probe, self._followed.loss) if each is not None]
        return Armed(capture, step, selection, turn, guard, others, hooks)

    def _chooser(self, selection: Selection) -> Chooser:
        """Return the chooser of the coming step's rows."""
        return Chooser(self._asked.max_rows, self._generator)

    def _plan(self, selection: Selection) -> Plan | None:
        """Return a plan for measuring the coming step by plain hooks; None if they can't do it."""
        if world_size() > 1:
            return None  # all functions need to be watched
        return self._trace.plan(selection, self._history.distrusted | self._history.suspected)

    def _awaits_step(self) -> bool | None:
        """Whether layers were called; None if the followed optimizer has begun its step."""
        armed = self._armed
        # After its first attempt, steps of others around or within its step are part of it.
        if self._followed.optimizer is None or armed is None or armed.attempts:
            return None
        return armed.capture.saw_calls()

    def _give_up(self, other: str) -> None:
        """Drop the armed step and warn: another optimizer takes the steps."""
        self.disarm()
        self.given_up = True
        self._patience *= 2  # if the followed one steps again, the optimizers alternate
        own = type(self._followed.optimizer).__name__
        self._failures.warn(
            "overtaken",
            f"adiv_monitor: another optimizer ({other}) than the monitor's ({own}) trains the "
            "parameters. Nothing is measured until the monitor's optimizer steps again; create a "
            "new Monitor for the new optimizer",
        )

    def _renew(self) -> Forwards | None:
        """Arm anew, as the first forward pass begins, if more is trained than when it was armed.

        For example, layers have been unfrozen, or the optimizer has a new parameter group.
        """
        armed = self._armed
        if armed is not None and armed.others.steps >= self._patience:
            self._give_up(armed.others.last)
            return None
        if (
            armed is None
            or armed.capture.saw_calls()
            or armed.selection.knows(self._followed.trained())
        ):
            return None
        self.arm()
        return None if self._armed is None else self._armed.capture.forwards

    def _agree(self, point: str, *, participates: bool = True) -> bool:
        """Whether all ranks, including this one, participate in this point of the step."""
        attempt = 0 if self._armed is None else self._armed.attempts
        return self._assembly.agree(self._number, f"{attempt}/{point}", participates=participates)

    def step_begins(
        self, number: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the begin of an optimizer step; a measured step's closure is replaced."""
        self._number = number
        if self._pending is not None:
            self._failures.safely(self.finish)
        if self._assembly:
            self._failures.safely(self._assembly.proceed)
        if self._armed is None:
            return None
        if self._armed.guard.broken:
            self._assembly.decline(number, wholly=True)
            return None
        try:
            return self._read_gradients(self._armed, optimizer, args, kwargs)
        except BaseException:
            self._assembly.decline(number, wholly=False)
            raise

    def _read_gradients(
        self, armed: Armed, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Read the gradients now, or after the step's closure, if it has one."""
        armed.attempts += 1
        armed.rates = self._failures.safely(learning_rates, optimizer) or NO_RATES
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            armed.closure_calls = None
            armed.gradients_final(optimizer)
            return None

        armed.closure_calls = 0
        weights = self._failures.safely(armed.step.weights) or []

        def closure_then_read(*args: Any, **kwargs: Any) -> Any:
            if armed.closure_calls:  # several calls are refused: no more rows are needed
                self._failures.safely(armed.capture.detach)
            result = closure(*args, **kwargs)
            armed.closure_calls = (armed.closure_calls or 0) + 1
            if armed.closure_calls == 1:
                self._failures.safely(armed.step.weights_moved, weights)
                self._failures.safely(armed.gradients_final, optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_then_read, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_read}

    def step_ends(self, number: int) -> None:
        """Handle the end of the optimizer's step."""
        self._ends(self._stepped, number)

    def gradient_is_complete(self, number: int) -> None:
        """Complete a step without an optimizer, when its gradient is complete."""
        self._ends(self._measure_gradient, number)

    def _ends(self, measure: Callable[[Armed, int], None], number: int) -> None:
        if self._armed is None:
            return
        try:
            if not self._armed.guard.broken:
                self._failures.safely(measure, self._armed, number)
        finally:
            self.disarm()

    def _measure_gradient(self, armed: Armed, number: int) -> None:
        self._number = number
        armed.step.gradient_is_final(steps=False)
        self._stepped(armed, number)
        self.finish()

    def _stepped(self, armed: Armed, number: int) -> None:
        """Measure the parameters' update, then wait for the next forward pass."""
        self.disarm()
        armed.capture.tell(self._trace)
        if armed.attempts > 1:
            self._failures.notes.append(
                "The optimizer's step raised an exception before it was taken: its first attempt "
                "is not in this report."
            )
        if armed.closure_calls not in (None, 1):
            self._failures.notes.append(
                f"Step {number} was not measured: the optimizer evaluated its closure "
                f"{armed.closure_calls} times, so no single gradient belongs to its update."
            )
            self._failures.warn("closure", f"adiv_monitor: {self._failures.notes[-1]}")
            armed.step.discard()
        elif self._followed.optimizer is not None:
            armed.step.updated()
        alignment = self._failures.safely(self._aligned) or {}
        held = list(self._followed.trained())
        if not armed.selection.knows(held):
            self._failures.notes.append(
                "Parameters became trainable after the step's first forward pass: they are not in "
                "this report."
            )
        self._pending = Pending(armed, armed.selection.stepped(held), number, alignment)
        if not self._compiled:  # a hook would become part of the compiled code
            # An embedding with max_norm renormalizes its rows in its forward.
            owners = armed.selection.owners
            renormed = [m for m in owners if getattr(m, "max_norm", None) is not None]
            guard, counts = self._failures.safely, armed.step.is_as_stepped
            last = renormed[-1:] or armed.capture.first_called()
            self._pending.wait(NextForward(last, self._next_begins, guard, counts))

    def _next_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at the next step's batch, and finish the pending step."""
        if self._pending is not None:
            self._pending.armed.capture.next_begins(module, args, kwargs)
        self.finish()

    def _look(self) -> None:
        """Record that an armed step's forward pass begins, and whether its caller is compiled."""
        self._schedule.forward_begins()
        self._compiled = in_compiled_code()

    def disarm(self) -> None:
        """Remove the hooks."""
        surely(self._disarm)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.release()
            self._armed = None

    def finish(self) -> None:
        """Complete this rank's contribution to the pending step, and pass it to the assembly."""
        if self._pending is None:
            return
        pending = self._pending
        surely(pending.release)
        self._pending = None
        self._finish(pending)

    def _finish(self, pending: Pending) -> None:
        step = pending.armed.step
        step.applied()
        part = step.contribution(pending.number)
        self._checked |= part.checked
        self._failures.switched_off |= part.misdescribed
        describe(part, pending, self._failures, self._schedule.interval)
        # Last: losses that are taken are in no later report, even if this one fails.
        part.report = replace(part.report, losses=self._losses.take(pending.number))
        self._assembly.add(part)
        for path, reason in part.misdescribed.items():
            self._failures.warn(path, f"adiv_monitor: layer '{path}' is not measured: {reason}")

    def complete(self) -> None:
        """Complete all reports now, with the contributions of other ranks."""
        self.finish()
        self._assembly.wait()

    def all_stop(self, number: int) -> bool:
        """Whether all ranks stop because of this step's report; the same result in all ranks."""
        return self._assembly.all_stop(number)

    def wait(self) -> None:
        """Complete the reports that wait only for other ranks."""
        self._assembly.wait()

    def end(self, patience: float | None = None) -> None:
        """Complete all reports, as the monitor is closed.

        Args:
            patience: largest time to wait for other ranks, in seconds; None: the default.
        """
        call_all(self.finish, partial(self._assembly.end, patience), self._schedule.end)

    def release(self) -> None:
        """Remove every hook and drop the current step and copies, whatever has failed before."""
        surely(call_all, self._disarm, self._forget_pending, self._history.flats.clear)

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._pending.release()
            self._pending = None

    def _complete(self, part: RankContribution) -> StepReport:
        """Return the report of a step."""
        return report_of(part, self._history, self._failures)
