"""Control of a measured step, from its hooks to its report.

The events of a step, what handles them, and what holds a layer afterwards:

    before the forward pass    `arm` puts hooks on the modules
    a module runs              `capture/gathering.py`, `Gathering.use`: a `Call`, with Φ and z
    the backward pass          `Gathering._on_gradient`, `Accumulation._after`: the call has G
    the optimizer's step       `step_begins` → `MeasuredStep.gradient_is_final`: `Capture.finish`
        begins                 gives `LayerRows`; `FinalGradient.begin` computes e:
                               `LayerInProgress`
        ends                   `step_ends` → `MeasuredStep.updated` computes d
    the next step begins, or   `read` → `MeasuredStep.contribution`: one transfer to the host;
        somebody reads         `RankContribution` has the `StepSums`
    all ranks have sent theirs `Assembly` → `outcome.understand`: a
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
from adiv_monitor.capture.check import Check
from adiv_monitor.capture.context import Context
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.loss_hook import LossHook, LossOf
from adiv_monitor.capture.passes import Passes
from adiv_monitor.capture.selection import Selection, trainable
from adiv_monitor.capture.trace import Trace
from adiv_monitor.report import AlignmentReading, StepReport, Turn
from adiv_monitor.rerun.eager import in_compiled_code
from adiv_monitor.step.armed import Armed
from adiv_monitor.step.assembly import Assembly
from adiv_monitor.step.description import describe
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.loss_log import LossLog
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.others import Others
from adiv_monitor.step.outcome import understand
from adiv_monitor.step.probing import ProbeStep, Probing
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import NO_RATES, learning_rates
from adiv_monitor.step.whole_model import WholeModel

# After this many steps of other optimizers, without one of its own, an armed step is dropped.
_OTHERS = 3

Stepping = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of an optimizer's step


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
        assembly: makes the reports, with the other ranks.
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
        self.assembly = Assembly(asked.max_rows, generator, self._complete, report)
        self._checked: set[str] = set()  # layers whose rule has been verified
        self._compiled = False  # whether compiled code called the model in the last measured step
        self._number = 0  # number of the current step
        self._armed: Armed | None = None
        self._taken: Armed | None = None  # the step that was taken, until it is read
        self._alignment: Alignment | None = None
        self._reference: dict[str, Any] | None = None

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
        seen = "1 forward pass" if passes == 1 else f"{passes} forward passes"
        return (
            "no step of the monitor's optimizer was taken while the monitor was on, so nothing was "
            f"measured ({seen} with gradients; were they too few for an accumulation, all skipped, "
            "or does another optimizer train the model?)"
        )

    def sees_loss(self, loss: Tensor) -> None:
        """Follow the backward passes of a loss, if the step is measured."""
        if self._armed is not None:
            self._armed.capture.passes.follow(loss)

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

    def arm(self, number: int) -> None:
        """Attach the hooks, before the forward pass of the step of this number."""
        self.disarm()
        self._armed = armed = self._next(number)
        try:
            armed.attach()
        except BaseException:
            self.disarm()
            raise

    def _next(self, number: int) -> Armed:
        """Prepare the coming step, without attaching any hooks yet."""
        selection, turn = self._followed.select()
        guard = Guard(self._failures.lost)
        others = Others(
            self._followed.optimizer,
            selection.parameters,
            self._is_overtaken,
            self._failures.safely,
        )
        plan = self._trace.plan(selection, self._history.distrusted)
        context = Context(
            guard,
            fail=self._failures.switch_off,
            switched_off=self._failures.switched_off,
            checked=self._checked,
            begins=partial(self._failures.safely, self._look),
            passes=Passes(guard, lambda: others.begun),
            attainable=self._asked.attainable,
            check=Check(partial(self._history.asks, surveys=plan is None)),
        )
        capture = Capture(
            self._followed.model,
            selection,
            Chooser(self._asked.max_rows, self._generator),
            context,
            plan=plan,
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
        return Armed(number, capture, step, selection, turn, guard, others, hooks)

    def _look(self) -> None:
        """Record that an armed step's forward pass begins, and whether its caller is compiled."""
        self._schedule.forward_begins()
        self._compiled = in_compiled_code()

    def _is_overtaken(self, other: str) -> None:
        """Drop the armed step and warn, if another optimizer takes the steps."""
        armed = self._armed
        if armed is None or not armed.capture.saw_calls():
            return
        armed.overtaken += 1
        if armed.overtaken < _OTHERS:
            return
        self.disarm()
        own = type(self._followed.optimizer).__name__
        self._failures.warn(
            "overtaken",
            f"adiv_monitor: another optimizer ({other}) than the monitor's ({own}) trains the "
            "parameters. Nothing is measured until the monitor's optimizer steps again; create a "
            "new Monitor for the new optimizer",
        )

    def _agree(self, point: str) -> bool:
        """Whether all ranks, including this one, participate in this point of the step."""
        attempt = 0 if self._armed is None else self._armed.attempts
        return self.assembly.agree(self._number, f"{attempt}/{point}")

    def step_begins(
        self, number: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Stepping | None:
        """Handle the begin of an optimizer step; a measured step's closure is replaced."""
        self._number = number
        self._failures.safely(self.read)
        armed = self._armed
        if armed is None or armed.guard.broken:
            return None
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

    def step_ends(self) -> None:
        """Handle the end of the optimizer's step; without one, the gradient is complete now."""
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
        has_optimizer = self._followed.optimizer is not None
        if not has_optimizer:
            self._number = armed.number
            armed.step.gradient_is_final(steps=False)
        self.disarm()
        armed.capture.tell(self._trace)
        if armed.attempts > 1:
            self._failures.notes.append(
                "The optimizer's step raised an exception before it was taken: its first attempt "
                "is not in this report."
            )
        if armed.closure_calls not in (None, 1):
            self._failures.notes.append(
                f"Step {armed.number} was not measured: the optimizer evaluated its closure "
                f"{armed.closure_calls} times, so no single gradient belongs to its update."
            )
            self._failures.warn("closure", f"adiv_monitor: {self._failures.notes[-1]}")
            armed.step.discard()
        elif has_optimizer:
            armed.step.updated()
        armed.alignment = self._failures.safely(self._aligned) or {}
        held = list(self._followed.trained())
        if not armed.selection.knows(held):
            self._failures.notes.append(
                "Parameters became trainable after the step was prepared: they are not in this "
                "report."
            )
        armed.selection = armed.selection.stepped(held)
        self._taken = armed
        if not has_optimizer:
            self.read()
        elif not self._compiled:  # a hook would become part of the compiled code
            armed.await_batch()

    def disarm(self) -> None:
        """Remove the hooks."""
        if self._armed is not None:
            self._armed.release()
            self._armed = None

    def read(self) -> None:
        """Complete the report of the step that was taken, with those of the other ranks."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        taken.release()
        taken.step.applied()
        part = taken.step.contribution(taken.number)
        self._checked.update(part.checked)
        self._failures.switched_off |= part.misdescribed
        describe(part, taken, self._failures, self._schedule.interval)
        # Last: losses that are taken are in no later report, even if this one fails.
        part.report = replace(part.report, losses=self._losses.take(taken.number))
        for path, reason in part.misdescribed.items():
            self._failures.warn(path, f"adiv_monitor: layer '{path}' is not measured: {reason}")
        self.assembly.add(part)

    def end(self, patience: float | None = None) -> None:
        """Complete the report, as the monitor is closed.

        Args:
            patience: largest time to wait for other ranks, in seconds; None: the default.
        """
        self.assembly.ends(patience)
        call_all(self.read, self.assembly.leave, self._schedule.end)

    def release(self) -> None:
        """Remove every hook and drop the current step and copies, whatever has failed before."""
        taken, self._taken = self._taken, None
        call_all(self.disarm, *([] if taken is None else [taken.release]))
        self._history.flats.clear()

    def _complete(self, part: RankContribution) -> StepReport:
        """Return the report of a step."""
        return understand(part, self._history, self._failures.tell)
