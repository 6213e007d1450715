"""The course of a measured step: hooks, the gradient, the optimizer's step, the finished report."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.capture.attention.attention_calls import AttentionCalls
from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.forwards import Forwards, unwatched
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import NextForward
from adiv_monitor.capture.loss_hook import LossHook
from adiv_monitor.capture.realised.losses import LossOf
from adiv_monitor.capture.selection import Selection, trainable
from adiv_monitor.capture.trace import Plan, Trace
from adiv_monitor.capture.updates import RunHistory
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
from adiv_monitor.step.rank_contribution import RankContribution
from adiv_monitor.step.realised import Realised
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import learning_rates

# After so many steps of other optimizers, and none of the one that is followed, another took over.
_OTHERS = 3


@dataclass(frozen=True)
class Asked:
    """What is to be found out of a step, as `Monitor` was asked."""

    max_rows: int | None
    attainable: bool
    attention: bool
    realised: bool | LossOf
    alignment: Probe | None = None
    stops: bool = False


@dataclass(frozen=True)
class Followed:
    """The training whose steps are measured.

    Attributes:
        model: the model.
        optimizer: whose steps are measured; None: only gradients are.
        select: which parameters are to be measured in the coming step, and whose turn that is.
        loss: sees the losses of measured steps, if it does not stay on between them.
    """

    model: nn.Module
    optimizer: Optimizer | None
    select: Callable[[], tuple[Selection, Turn | None]]
    loss: LossHook | None = None

    def trained(self) -> Iterable[Tensor]:
        """What is trained, or would be if it were not frozen."""
        if self.optimizer is None:
            return trainable(self.model)
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class StepController:
    """Takes measured steps from before their forward passes to their reports.

    Args:
        followed: the training.
        asked: what is to be found out.
        generator: the monitor's own source of chance.
        schedule: times measured steps.
        failures: knows what to do about exceptions.
        report: gets every report, and whether this rank is to write it.
        losses: those of the steps so far.

    Attributes:
        given_up: the step that was armed was dropped, as other optimizers took the steps.
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
        self._trace = Trace()
        self._assembly = Assembly(
            asked.max_rows, generator, self._complete, report, at_once=asked.stops
        )
        self._checked: set[str] = set()  # layers whose rule was seen to hold
        self._compiled = False  # was the model called by compiled code, when last measured?
        self._number = 0  # of the step under way
        self._patience = _OTHERS
        self._armed: Armed | None = None
        self._pending: Pending | None = None
        self._alignment: Alignment | None = None
        self._reference: dict[str, Any] | None = None

    def saw_calls(self) -> bool:
        """Whether layers were called in a step that was not taken yet."""
        return self._armed is not None and self._armed.capture.saw_calls()

    def join(self, name: str) -> None:
        """The monitor is attached; its reports are to speak for all ranks that have one.

        Args:
            name: of what is measured, the same in all ranks.
        """
        self._assembly.join(name)

    def refer(self) -> None:
        """The point that alignments are compared with is now."""
        if self._asked.alignment is not None:
            self._alignment = Alignment(self._followed.model, self._asked.alignment)
            if self._reference is not None:
                self._alignment.load_state_dict(self._reference)

    def reference(self) -> dict[str, Any] | None:
        """What a resumed run needs to compare alignments with the same point."""
        return self._reference if self._alignment is None else self._alignment.state_dict()

    def resume(self, reference: dict[str, Any] | None) -> None:
        """Compare alignments with this point; before `refer`."""
        self._reference = reference

    def _aligned(self) -> Mapping[str, AlignmentReading]:
        """How weights and activations are aligned now, if that was asked for."""
        return {} if self._alignment is None else self._alignment.read()

    def arm(self) -> None:
        """Put the hooks on, before the forward pass of a step to measure."""
        try:
            self.disarm()
            self.given_up = False
            self._armed = self._next()
            self._armed.attach()
        except BaseException:
            self.disarm()
            raise

    def _next(self) -> Armed:
        """The coming step, with nothing put on yet."""
        selection, turn = self._followed.select()
        guard = Guard(self._failures.lost)
        realised = self._follow(selection)
        capture = Capture(
            self._followed.model,
            selection,
            max_rows=self._asked.max_rows,
            generator=self._generator,
            step=self._number,
            attainable=self._asked.attainable,
            attention=self._attention_calls(selection) if self._asked.attention else None,
            checked=self._checked,
            switched_off=set(self._failures.switched_off),
            fail=self._failures.switch_off,
            guard=guard,
            begins=partial(self._failures.safely, self._look),
            renew=partial(self._failures.safely, self._renew),
            plan=self._plan(selection),
            pieces=self._trace.pieces,
            calls=None if realised is None else realised.calls,
        )
        step = MeasuredStep(
            *(
                capture,
                selection,
                self._history,
                self._failures.switch_off,
                self._generator,
            ),
            realised,
            self._agree,
        )
        others = Others(
            self._followed.optimizer, selection.parameters, self._awaits_step, self._failures.safely
        )
        hooks = [each for each in (realised, self._followed.loss) if each is not None]
        return Armed(capture, step, selection, turn, guard, others, hooks)

    def _plan(self, selection: Selection) -> Plan | None:
        """What plain hooks can do of the coming step."""
        asked = self._asked
        if asked.attention or asked.realised is not False or world_size() > 1:
            return None  # all functions are watched, or run again
        return self._trace.plan(selection, self._history.distrusted | self._history.suspected)

    def _awaits_step(self) -> bool:
        """Whether layers were called, and the optimizer that is followed is yet to step."""
        armed = self._armed
        # From its first attempt on, another's step around its step, or within it, is part of that.
        if self._followed.optimizer is None or armed is None or armed.attempts:
            return False
        return armed.capture.saw_calls()

    def _give_up(self, other: str) -> None:
        """Steps are taken, but by another optimizer."""
        self.disarm()
        self.given_up = True
        self._patience *= 2  # if it steps again, they take turns: wait for its turn
        own = type(self._followed.optimizer).__name__
        self._failures.warn(
            "overtaken",
            f"adiv_monitor: steps are taken that the monitor does not see: an optimizer ({other}) "
            f"other than the one that it was given ({own}) trains the parameters. Nothing is "
            "measured until that one steps again; give a new Monitor the new optimizer",
        )

    def _renew(self) -> Forwards | None:
        """The step's first forward pass begins: arm anew if more is trained than when it was armed.

        Layers were unfrozen since, say, or a group was added to the optimizer.
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
        """Whether all ranks, this one among them, take part in this point of the step."""
        attempt = 0 if self._armed is None else self._armed.attempts
        return self._assembly.agree(self._number, f"{attempt}/{point}", participates=participates)

    def _follow(self, selection: Selection) -> Realised | None:
        """What notes the coming step, to find out what it really does, if asked for."""
        if self._asked.realised is False:
            return None
        loss = None if isinstance(self._asked.realised, bool) else self._asked.realised
        return Realised(
            self._followed.model, selection, loss, partial(self._failures.tell, "realised")
        )

    def _attention_calls(self, selection: Selection) -> AttentionCalls:
        return AttentionCalls(selection, self._generator, self._attention_failed)

    def _attention_failed(self, path: str, error: Exception) -> None:
        self._failures.tell(f"attention of '{path}'", error)

    def step_begins(
        self, number: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer step of this number begins; a measured one's closure is replaced."""
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
        """Now, or where the step has a closure, when that has made them."""
        armed.attempts += 1
        armed.learning_rates = self._failures.safely(learning_rates, optimizer) or ()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            armed.closure_calls = None
            armed.gradients_final(optimizer)
            return None

        armed.closure_calls = 0
        weights = self._failures.safely(armed.step.weights) or []

        def closure_then_read(*args: Any, **kwargs: Any) -> Any:
            if armed.closure_calls:  # it will be refused: look at no more rows
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
        """The optimizer's step of this number has ended."""
        self._ends(self._stepped, number)

    def gradient_is_complete(self, number: int) -> None:
        """Without an optimizer: that is all there is of a step."""
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
        armed.step.gradient_is_final(1.0, steps=False)
        self._stepped(armed, number)
        self.finish()

    def _stepped(self, armed: Armed, number: int) -> None:
        """The parameters have moved: measure that, then wait for the next forward pass."""
        self.disarm()
        armed.capture.tell(self._trace)
        if armed.attempts > 1:
            self._failures.notes.append(
                "The optimizer's step raised before it was taken: what was done before it raised "
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
        selection = armed.selection.stepped(held)
        self._pending = Pending(
            *(armed.step, armed.capture, selection, armed.turn, number, alignment),
            armed.learning_rates,
        )
        if not self._compiled:  # a hook would become part of the compiled code
            modules = armed.selection.owners
            # An embedding that keeps its rows short changes them when it looks them up.
            renormed = [m for m in modules if getattr(m, "max_norm", None) is not None]
            guard = self._failures.safely
            last = renormed[-1:] or modules
            self._pending.wait(NextForward(last, self.finish, guard, ends=bool(renormed)))
            if self._asked.realised is not False:  # before anything of that pass has run
                first = armed.selection.modules
                self._pending.wait(NextForward(first, armed.step.realise, guard))

    def _look(self) -> None:
        """The forward pass of an armed step begins: when, and who called the model?"""
        self._schedule.forward_begins()
        self._compiled = in_compiled_code()

    def disarm(self) -> None:
        """Take the hooks off."""
        surely(self._disarm)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.release()
            self._armed = None

    def finish(self) -> None:
        """Complete what this rank knows of the pending step, and hand it on."""
        if self._pending is None:
            return
        pending = self._pending
        surely(pending.release)
        try:
            self._pending = None
            self._finish(pending)
            pending.room.leave()
        finally:
            pending.room.leave()

    def _finish(self, pending: Pending) -> None:
        pending.step.realise()
        with unwatched():  # as the next forward pass is already: thousands of calls
            pending.step.applied()
            part = pending.step.part()
            self._checked |= part.checked
            self._failures.switched_off |= part.misdescribed
            describe(part, pending, self._failures, self._schedule.interval)
            part.losses = self._losses.take(pending.number)
        self._assembly.add(pending.number, part)
        for path, reason in part.misdescribed.items():
            self._failures.warn(path, f"adiv_monitor: layer '{path}' is not measured: {reason}")

    def complete(self) -> None:
        """Complete all reports now, with what other ranks report of them."""
        self.finish()
        self._assembly.wait()

    def all_stop(self, number: int) -> bool:
        """Whether all ranks stop by the report of this step; the answer is the same in all."""
        return self._assembly.all_stop(number)

    def wait(self) -> None:
        """Complete those that only wait for other ranks."""
        self._assembly.wait()

    def end(self, patience: float | None = None) -> None:
        """The monitor is closed: complete all reports.

        Args:
            patience: for how many seconds to wait for other ranks at most; None: as is usual.
        """
        call_all(self.finish, partial(self._assembly.end, patience), self._schedule.end)

    def release(self) -> None:
        """Whatever has failed so far: take every hook off, and give up what is under way."""
        surely(call_all, self._disarm, self._forget_pending)

    def _forget_pending(self) -> None:
        if self._pending is not None:
            call_all(self._pending.release, self._pending.room.leave)
            self._pending = None

    def _complete(self, number: int, part: RankContribution) -> StepReport:
        """The report of a step."""
        return report_of(number, part, self._history, self._failures)
