"""The life of a measured step, in four events. At other steps it notes losses, rates and norms.

- armed: `arm`, before the step's forward pass, puts hooks on (`Armed`). When a module runs,
  `capture/catch.py` makes a `Call`, with Φ and z; in the backward pass the call gets G.
- gradient is final: `step_begins`, or once the optimizer has called its closure.
  `MeasuredStep.gradient_is_final` gets `LayerRows` from `Capture.finish`, and computes e:
  `LayerInProgress`.
- stepped: `step_ends`, also from `end_step` without an optimizer. `MeasuredStep.updated` computes
  d. All hooks are off, but those that wait for the next batch.
- read: `read`, as the next step begins or somebody asks. `Armed.contribution` makes one
  transfer to the host: `StepSums`, in a `RankContribution`. Once all ranks have sent theirs,
  `Ranks` calls `understand`: a `LayerReading` each, in the `StepReport`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
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
from adiv_monitor.rerun.surroundings import checksum, version
from adiv_monitor.step.armed import Armed
from adiv_monitor.step.every_norm import EveryNorm
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.loss_log import LossLog
from adiv_monitor.step.loss_watch import LossWatch
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.messages import RankContribution
from adiv_monitor.step.outcome import understand
from adiv_monitor.step.ranks import Ranks
from adiv_monitor.step.run_history import RunHistory
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import Others, RateFalls, learning_rates, state_of
from adiv_monitor.step.training import Training, norm_momenta
from adiv_monitor.step.unsharded import UnshardedParameters
from adiv_monitor.step.whole_model import WholeModel

if TYPE_CHECKING:
    from adiv_monitor.alignment.instrument import Alignment
    from adiv_monitor.step.probing import ProbeStep

_MOVED = (
    "The optimizer moved the weights before the gradient was computed (as SAM does), so its "
    "update does not start where the gradient was computed: not measured."
)
_MANY = 64  # losses of one step, of more micro-batches than are usual
_UNSTEPPED = (
    "no step of the monitor's optimizer, or call of end_step(), was seen since step {} was to be "
    "taken, so nothing was measured from then on (is the optimizer's step() never called, as where "
    "scheduler.step() stands in its place, were the backward passes too few for an accumulation, "
    "were all steps skipped, since gradients overflow, or does another optimizer train the model?)"
)
Stepping = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of an optimizer's step


@dataclass(eq=False)
class StepController:
    """Controller of measured steps, from before their forward passes to their reports.

    Attributes:
        training: the training, and what is measured in it.
        generator: the monitor's own random generator.
        schedule: schedule that times measured steps.
        failures: handler of exceptions.
        now: returns the number of the current step.
        report: called with every report, and whether this rank is to write it.
        ranks: makes the reports, with the other ranks.
        losses: log of the losses of the steps so far.
    """

    training: Training
    generator: np.random.Generator
    schedule: Schedule
    failures: Failures
    now: Callable[[], int]
    report: Callable[[StepReport, bool], None]
    losses: LossLog = field(default_factory=LossLog)
    _watch: LossWatch = field(default_factory=LossWatch)
    _falls: RateFalls = field(default_factory=RateFalls)
    _norms: EveryNorm | None = None
    _alignment: "Alignment | None" = None
    _reference: dict[str, Any] | None = None  # of a run that is resumed
    _history: RunHistory = field(default_factory=RunHistory)
    _trace: Trace = field(default_factory=Trace)
    _loss: LossHook | None = None
    _probe: "Callable[[Selection], ProbeStep] | None" = None
    _is_compiled: bool = False  # whether compiled code called the model, when last measured
    _armed: Armed | None = None
    _taken: Armed | None = None  # the step that was taken, until it is read

    def __post_init__(self) -> None:
        training, fail = self.training, self.failures.tell
        self._whole = WholeModel(training)
        self.ranks = Ranks(training.max_rows, self.generator)
        if training.watch == "norms":
            self._norms = EveryNorm(training.selection())
        if (loss := training.seen_loss) is not None:
            said = partial(fail, "the loss")
            self._loss = LossHook(loss, training.model, self._sees_loss, said)
        if training.attention or training.realised is not False:
            from adiv_monitor.probe.batch import Batch
            from adiv_monitor.step.probing import ProbeStep  # slow

            batch = Batch(training.model, training.probe_loss, partial(fail, "the probe"))
            self._probe = partial(ProbeStep, training, batch, deepcopy(self.generator), fail)

    # --- the run ----------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Arm the first step; `name` is the same in all ranks."""
        safely, training, number = self.failures.safely, self.training, self.now()
        if self._loss is not None and self._loss.stays:
            safely(self._loss.put_on)
        safely(self.ranks.join, name)
        safely(self.schedule.begin, number, next(training.model.parameters()))
        safely(self._refer)
        safely(self.arm)

    def _refer(self) -> None:
        """Make the present state the reference point of alignments."""
        if self.training.alignment is not None:
            from adiv_monitor.alignment.instrument import Alignment

            self._alignment = Alignment(self.training.model, self.training.alignment)
            if self._reference is not None:
                self._alignment.load_state_dict(self._reference)

    def reference(self) -> dict[str, Any] | None:
        """Return the reference point of alignments, for a resumed run."""
        return self._reference if self._alignment is None else self._alignment.state_dict()

    def resume(self, reference: dict[str, Any] | None) -> None:
        """Set the reference point of alignments; call this before `begin`."""
        self._reference = reference

    def _sees_loss(self, loss: Tensor, given: Sequence[Any]) -> None:
        self.losses.add(self.now(), loss, is_said=False)
        if self._armed is not None:
            self._armed.capture.passes.follow(loss, given)

    def end(self, patience: float | None) -> None:
        """Complete the report, as the monitor is closed.

        Args:
            patience: largest time to wait for other ranks, in seconds; None: the default.
        """
        self.ranks.patience = patience
        call_all(self.read, self.ranks.leave)

    def release(self) -> None:
        """Remove the hooks, and drop the current step and copies, whatever has failed before."""
        taken, self._taken = self._taken, None
        call_all(self.disarm, *([] if taken is None else [taken.release]))
        self._history.state = None

    def leave(self) -> None:
        """Remove every hook, also that on the loss; it can be called again."""
        call_all(self.release, *([] if self._loss is None else [self._loss.remove]))

    def unstepped(self) -> str:
        """Return that losses, or the first calls of layers, came without a step, or ""."""
        armed = None if self._history.seen else self._armed
        is_waiting = armed is not None and armed.capture.rows and not armed.guard.broken
        is_late = is_waiting or self.losses.of(self.now()) > _MANY
        return _UNSTEPPED.format(self.now()) if is_late else ""

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
        training, history, failures = self.training, self._history, self.failures
        selection, turn = training.due(self.schedule.turns)
        if self._norms is not None:
            self._norms.selection = selection
        guard = Guard(failures.lost)
        others = Others(training.optimizer, selection.parameters, failures)
        plan = self._trace.plan(selection)
        takes_all = training.attainable and self.ranks.is_alone
        context = Context(
            guard,
            Chooser(None if takes_all else training.max_rows, self.generator),
            fail=failures.switch_off,
            switched_off=failures.switched_off,
            checked=history.checked_rules,
            begins=self._forward_begins,
            passes=Passes(guard, lambda: others.begun),
            check=Check(partial(history.asks, surveys=plan is None)),
        )
        capture = Capture(training.model, selection, context, plan)
        probe = None if self._probe is None else self._probe(selection)
        step = MeasuredStep(
            training,
            capture,
            history,
            fail=failures.switch_off,
            probe=probe,
            unsharded=UnshardedParameters(selection, partial(self.ranks.agree, self.now())),
            whole=self._whole,
        )
        loss = None if self._loss is None or self._loss.stays else self._loss
        hooks = [each for each in (probe, loss) if each is not None]
        return Armed(self.now(), capture, step, selection, turn, guard, others, hooks)

    def _forward_begins(self) -> None:
        self.failures.safely(self.schedule.forward_begins)
        self._is_compiled = in_compiled_code()
        if self._armed is not None and "random_states" not in self._armed.told:
            self.failures.safely(self._note_random, self._armed)

    def _note_random(self, armed: Armed) -> None:
        for parameter in armed.selection.parameters[:1]:  # none, if all are refused
            before = armed.told.get("random_states", ())[:1]
            armed.told["random_states"] = (*before, checksum(parameter.device))

    def disarm(self) -> None:
        """Remove the hooks."""
        if self._armed is not None:
            self._armed.release()
            self._armed = None

    # --- the gradient is final --------------------------------------------------------------------

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Stepping | None:
        """Read the last measured step; if this one is measured, read its gradient.

        Returns:
            The arguments of the optimizer's step with another closure; None: as they are.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.failures.safely(self.read)
        self.failures.safely(self._falls.sees, optimizer)
        if self._norms is not None and not callable(closure):
            self.failures.safely(self._norms.begins, optimizer)
        armed = self._armed
        if armed is None or armed.guard.broken:
            return None
        armed.rates = self.failures.safely(learning_rates, optimizer) or armed.rates
        armed.told |= {"dropout": self.training.dropout, "rate_falls": self._falls.count}
        armed.told["norm_momenta"] = self.failures.safely(norm_momenta, armed.selection) or {}
        armed.capture.norm_passes = self.failures.safely(self.training.norm_passes) or []
        self.failures.safely(self._note_random, armed)
        if not callable(closure):
            armed.closure_calls = None
            armed.step.gradient_is_final(optimizer)
            return None
        armed.closure_calls = 0
        before = [*map(version, armed.selection.parameters)]

        def closure_then_read(*args: Any, **kwargs: Any) -> Any:
            if armed.closure_calls:  # several calls are refused: no more rows are needed
                self.failures.safely(armed.capture.detach)
            result = closure(*args, **kwargs)
            armed.closure_calls = (armed.closure_calls or 0) + 1
            if armed.closure_calls == 1:
                self.failures.safely(self._closed, armed, optimizer, before)
            return result

        if len(args) > 1:
            return (args[0], closure_then_read, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_read}

    def _closed(self, armed: Armed, optimizer: Optimizer, before: list[int]) -> None:
        """Read the gradient that a closure has computed; weights must have these versions yet."""
        armed.step.gradient_is_final(optimizer)
        if before != [*map(version, armed.selection.parameters)]:
            armed.step.refused = _MOVED

    # --- stepped ----------------------------------------------------------------------------------

    def step_ends(self) -> None:
        """Measure the update; without an optimizer, the gradient is complete now, and is read."""
        if self._norms is not None:
            self.failures.safely(self._norms.ends, self.now())
        if self.training.watch is not None and self.ranks.is_alone:
            new = self.losses.looked_at(self.now())
            if self.failures.safely(self._watch.spikes, new):
                self.schedule.ask(self.now())
        armed = self._armed
        if armed is None:
            return
        try:
            if not armed.guard.broken:
                self.failures.safely(self._stepped, armed)
        finally:
            self.disarm()

    def _stepped(self, armed: Armed) -> None:
        """Measure the parameters' update; the rest waits until the next step begins."""
        optimizer, notes = self.training.optimizer, self.failures.notes
        if optimizer is None:
            armed.step.gradient_is_final(None)
        self.disarm()
        armed.capture.tell(self._trace)
        if armed.closure_calls not in (None, 1):
            why = (
                f"Step {armed.number} was not measured: the optimizer evaluated its closure "
                f"{armed.closure_calls} times, so no single gradient belongs to its update."
            )
            self.failures.warn("closure", f"adiv_monitor: {why}")
            armed.step.discard(why)
        elif optimizer is not None:
            armed.step.updated()
            is_new = self._history.renews(armed.rates.state, state_of(optimizer))
            armed.told["new_state"] = is_new
        if self._alignment is not None:
            armed.told["alignment"] = self.failures.safely(self._alignment.read) or {}
        held = self.training.trained()
        if not armed.selection.knows(held):
            notes.append(
                "Parameters became trainable after the step was prepared: they are not in this "
                "report."
            )
        armed.selection = armed.selection.stepped(held)
        self._taken = armed
        if optimizer is None:
            self.read()
        elif not self._is_compiled:  # a hook would become part of the compiled code
            armed.await_gradient()
            armed.await_batch()

    # --- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Complete the report of the step that was taken, with those of the other ranks."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        taken.release()
        taken.step.applied()
        part = taken.contribution(self.failures, self.schedule.planned)
        # Last: losses that are taken are in no later report, even if this one fails.
        losses, counts, are_seen = self.losses.take(taken.number)
        told: dict[str, Any] = {"losses": losses, "loss_counts": counts}
        if self._loss is not None and are_seen:
            told["loss_module"], told["loss_settings"] = self._loss.of_torch, self._loss.settings
            told["loss_weights"] = self._loss.weights
        if self._norms is not None:
            told["gradient_norms"], told["update_norms"] = self._norms.take()
        part.report = replace(part.report, **told)
        report, writes = self.ranks.report(part, self._complete)
        self.schedule.reported(report.step, report.interval)
        self.report(report, writes)

    def _complete(self, part: RankContribution) -> StepReport:
        """Return the report of a step, of one rank or of all."""
        if self.ranks.is_alone and not part.refused:  # ranks would check different layers
            self._history.checks(part.sums)
        if self.training.watch is not None:
            # Ranks would not measure the same steps, so that nothing was watched before.
            losses = {} if self.ranks.is_alone else part.report.losses
            self._watch.spikes({step: [loss] for step, loss in losses.items()})
            part.report = replace(part.report, spikes=self._watch.take(part.report.step))
        report = understand(part, self._history)
        if self._loss is not None and not report.losses:
            report = replace(report, notes=(*report.notes, self._loss.unseen))
        return report
