"""The monitor: when to measure, which layers, and where the reports go."""

import logging
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.arguments import (
    DEFAULT_MAX_ROWS,
    check_arguments,
    check_choice,
    held_parameters,
)
from adiv_monitor.capture.attention_calls import AttentionCalls
from adiv_monitor.capture.capture import Capture
from adiv_monitor.capture.eager import forced_eager, in_compiled_code
from adiv_monitor.capture.hook import Hook, NextForward
from adiv_monitor.capture.losses import LossOf
from adiv_monitor.capture.selection import LayerChoice, Selection, select, trainable
from adiv_monitor.capture.updates import Watch
from adiv_monitor.errors import AdivError
from adiv_monitor.report import StepReport
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.step.measured_step import MeasuredStep
from adiv_monitor.step.realised import Realised
from adiv_monitor.step.schedule import make_schedule
from adiv_monitor.step.stepping import is_within_own_step, stepping

_logger = logging.getLogger("adiv_monitor")


class Monitor:
    """Measures, every so many steps, what the step did to each layer's activations.

    Between measured steps there is nothing on the model, and a comparison before and after each
    optimizer step. The monitored run is bit-identical to the unmonitored one. The first step is
    always measured; steps are optimizer steps, counted from 0.

    The report of a step is complete, and goes to the sinks, when the next forward pass begins
    (until then code may still change the weights), where compiled code calls the model when the
    next optimizer step begins, and at the latest when the monitor is closed.

    Args:
        model: the model that is trained.
        optimizer: the optimizer whose steps are measured, any `torch.optim.Optimizer`, or a wrapper
            that holds one as its `optimizer` and runs no hooks; None: only what the gradient itself
            says is measured, and `end_step()` marks each step.
        every_n_steps: measure each step whose number is a multiple of this.
        max_overhead: the share of the training time that the monitor may take, such as 0.01: steps
            are timed, and the interval between measured ones becomes the smallest, but not below
            `every_n_steps` nor 16, that keeps to it. None: no clock has a say in what is measured.
        layers: glob patterns over module paths, or a predicate (path, module) → bool; all if None.
        max_rows: rows to look at per layer and step, chosen at random; None: all of them.
        attainable: measure the ceiling `attainable_cosine` too, which looks at all rows.
        attention: measure what the step does to attention scores too (`StepReport.attention`), on
            a few samples, for which twins of the modules that attend are run.
        realised: after each measured step, run its forward passes again with the new weights, and
            half-way to them: what really happened, beside what this layer's own step made happen
            (`realised_cosine`, `single_layer_share`, `first_order_error`). Instead of True: the
            loss, to have its change as well (`StepReport.realised_loss_change`): the module that
            computes it from what the model gave, or where that holds it, a function: what a call
            of the model gave → its loss, one number or one of each sample. Forward hooks run again
            too; random numbers, buffers and attributes of modules, gradients, modes and weights
            are as if nothing had run. It takes two forward passes and a copy of the parameters.
        sinks: where reports go; closed with the monitor.
        keep: how many reports `reports` holds.
        on_error: "warn": an exception inside the monitor switches the layer off with a warning and
            training goes on; "raise": it is raised.
        seed: of the choice of rows.

    Raises:
        TypeError, ValueError: an argument is not what is expected; the message says what is.

    Example:
        >>> import torch
        >>> from adiv_monitor import Monitor
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Monitor(model, optimizer) as monitor:
        ...     model(torch.ones(1, 3)).sum().backward()
        ...     optimizer.step()
        >>> round(monitor.latest.layers[""].scale_mean)
        4
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        every_n_steps: int = 50,
        max_overhead: float | None = None,
        layers: LayerChoice = None,
        max_rows: int | None = DEFAULT_MAX_ROWS,
        attainable: bool = False,
        attention: bool = False,
        realised: bool | LossOf = False,
        sinks: Sequence[Sink] = (),
        keep: int = 100,
        on_error: Literal["warn", "raise"] = "warn",
        seed: int = 0,
    ) -> None:
        optimizer = stepping(optimizer)
        check_arguments(
            *(model, optimizer, every_n_steps, max_overhead, layers, max_rows),
            *(realised, sinks, keep, on_error),
        )
        self._model = model
        self._optimizer = optimizer
        self._schedule = make_schedule(every_n_steps, max_overhead)
        self._choice = layers
        self._max_rows = max_rows
        self._attainable = attainable
        self._attention = attention
        self._realised = realised
        self._sinks = tuple(sinks)
        self._on_error = on_error
        self._generator = np.random.default_rng(seed)
        self._watch = Watch()
        self._checked: set[str] = set()  # layers whose rule was seen to hold
        self._switched_off: dict[str, str] = {}
        self._warned: set[str] = set()
        self._notes: list[str] = []
        self._state: Literal["new", "attached", "closed"] = "new"
        self._handles: list[RemovableHandle] = []  # on the optimizer
        self._compiled = False  # was the model called by compiled code, when last measured?
        self._armed: _Armed | None = None
        self._pending: _Pending | None = None
        self.step = 0
        self.reports: deque[StepReport] = deque(maxlen=keep)
        selection = self._select()
        check_choice(selection, model, layers)
        self._paths = " ".join(selection.paths)

    @property
    def latest(self) -> StepReport | None:
        """The last complete report; None before the first."""
        return self.reports[-1] if self.reports else None

    def __enter__(self) -> "Monitor":
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unstepped = self._armed is not None and self._armed.capture.saw_calls()
        self.close()
        if kind is None and unstepped and self.latest is None:
            missing = "call of end_step()" if self._optimizer is None else "step of its optimizer"
            self._warn(
                "no step",
                f"adiv_monitor: the model ran, but the monitor saw no {missing}, so there is no "
                "report: give it the optimizer that trains the model",
            )

    def attach(self) -> None:
        """Begin to follow the optimizer; the coming step is measured.

        Raises:
            AdivError: the monitor is attached already, or was closed.
        """
        if self._state != "new":
            raise AdivError(
                f"Monitor.attach: got a monitor that is {self._state}, expected a new one; "
                "make another Monitor to measure again"
            )
        self._state = "attached"
        if self._optimizer is not None:
            # A compiled optimizer step must not trace them.
            before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
            self._handles.append(self._optimizer.register_step_pre_hook(Hook(before)))
            self._handles.append(self._optimizer.register_step_post_hook(Hook(after)))
        self._schedule.begin(self.step, trainable(self._model)[0], self._paths)
        self._safely(self._arm)

    def close(self) -> None:
        """Finish the report under way, remove every hook and close the sinks. Can be repeated."""
        if self._state == "closed":
            return
        self._state = "closed"
        try:
            self._safely(self._finish)
        finally:
            self._disarm()
            for handle in self._handles:
                handle.remove()
            for sink in self._sinks:
                self._guard_sink(sink, sink.close)

    def end_step(self) -> None:
        """Without an optimizer: the gradients are complete; call it once per step.

        Raises:
            AdivError: there is an optimizer, whose steps count, or the monitor isn't attached.
        """
        if self._optimizer is not None or self._state != "attached":
            raise AdivError(
                f"Monitor.end_step: got a monitor that is {self._state}"
                f"{'' if self._optimizer is None else ' and has an optimizer'}, expected an "
                "attached one with optimizer=None; with an optimizer, steps are counted by "
                "themselves"
            )
        if self._armed is not None:
            self._safely(self._measure_gradient, self._armed)
        self._count()

    def _measure_gradient(self, armed: "_Armed") -> None:
        armed.step.gradient_is_final(1.0, steps=False)
        self._stepped(armed)
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs so that step numbers go on."""
        return {
            "step": self.step,
            "generator": self._generator.bit_generator.state,
            "costs": self._schedule.costs(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where the saved monitor was; before `attach`."""
        self.step = int(state["step"])
        self._generator.bit_generator.state = state["generator"]
        self._schedule.resume(state.get("costs", ()))

    # --- the course of a measured step -----------------------------------------------------------

    def _arm(self) -> None:
        """Put the hooks on, before the forward pass of a step to measure."""
        selection = self._select()
        realised = self._follow(selection)
        capture = Capture(
            self._model,
            selection,
            max_rows=self._max_rows,
            generator=self._generator,
            attainable=self._attainable,
            attention=self._attention_calls(selection) if self._attention else None,
            checked=self._checked,
            switched_off=set(self._switched_off),
            fail=self._switch_off,
            begins=partial(self._safely, self._look),
            calls=None if realised is None else realised.calls,
        )
        step = MeasuredStep(
            *(capture, selection.parameters, self._watch, self._switch_off, self._generator),
            realised,
        )
        self._armed = _Armed(capture, step, selection)
        self._armed.cleanup.enter_context(forced_eager())
        if realised is not None:
            self._armed.cleanup.callback(realised.detach)

    def _follow(self, selection: Selection) -> Realised | None:
        """What notes the coming step, to find out what it really does, if asked for."""
        if self._realised is False:
            return None
        loss = None if isinstance(self._realised, bool) else self._realised
        return Realised(self._model, selection, loss, self._not_realised)

    def _attention_calls(self, selection: Selection) -> AttentionCalls:
        return AttentionCalls(selection, self._generator, self._attention_failed)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Every optimizer step begins here; only measured ones have something armed or pending."""
        if is_within_own_step(optimizer):
            return None
        if self._pending is not None:
            self._safely(self._finish)
        if self._armed is None:
            return None
        return self._read_gradients(self._armed, optimizer, args, kwargs)

    def _read_gradients(
        self, armed: "_Armed", optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Now, or where the step has a closure, when that has made them."""
        armed.attempts += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            armed.closure_calls = None
            armed.gradients_final(optimizer)
            return None

        armed.closure_calls = 0
        weights = self._safely(armed.step.weights) or []

        def closure_then_read(*args: Any, **kwargs: Any) -> Any:
            if armed.closure_calls:  # it will be refused: look at no more rows
                armed.capture.detach()
            result = closure(*args, **kwargs)
            armed.closure_calls = (armed.closure_calls or 0) + 1
            if armed.closure_calls == 1:
                self._safely(armed.step.weights_moved, weights)
                armed.gradients_final(optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_then_read, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_read}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Every optimizer step ends here."""
        if is_within_own_step(optimizer):
            return
        if self._armed is not None:
            self._safely(self._stepped, self._armed)
        self._count()

    def _count(self) -> None:
        self.step += 1
        if self._safely(self._schedule.step_ended, self.step):
            self._safely(self._arm)

    def _stepped(self, armed: "_Armed") -> None:
        """The parameters have moved: measure that, then wait for the next forward pass."""
        self._disarm()
        if armed.attempts > 1:
            self._notes.append(
                "The optimizer's step raised before it was taken: what was done before it raised "
                "is not in this report."
            )
        if armed.closure_calls not in (None, 1):
            self._notes.append(
                f"Step {self.step} was not measured: the optimizer evaluated its closure "
                f"{armed.closure_calls} times, so no single gradient belongs to its update."
            )
            self._warn("closure", f"adiv_monitor: {self._notes[-1]}")
            armed.step.discard()
        elif self._optimizer is not None:
            armed.step.updated()
        self._pending = _Pending(armed.step, armed.capture, armed.selection, self.step)
        if not self._compiled:  # a hook would become part of the compiled code
            modules = armed.selection.owners
            # An embedding that keeps its rows short changes them when it looks them up.
            renormed = [m for m in modules if getattr(m, "max_norm", None) is not None]
            finish = NextForward(
                renormed[-1:] or modules, partial(self._safely, self._finish), ends=bool(renormed)
            )
            self._pending.cleanup.callback(finish.remove)
            if self._realised is not False:  # before anything of that pass has run
                realise = NextForward(
                    armed.selection.modules, partial(self._safely, armed.step.realise)
                )
                self._pending.cleanup.callback(realise.remove)

    def _look(self) -> None:
        """The forward pass of an armed step begins: when, and who called the model?"""
        self._schedule.forward_begins()
        self._compiled = in_compiled_code()

    def _disarm(self) -> None:
        if self._armed is not None:
            armed, self._armed = self._armed, None
            armed.capture.detach()
            armed.cleanup.close()

    def _finish(self) -> None:
        """Complete the pending report and hand it on."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.cleanup.close()
        pending.step.realise()
        pending.step.applied()
        outcome = pending.step.outcome()
        self._checked |= outcome.checked
        self._switched_off |= outcome.misdescribed
        seen = pending.capture.layers
        measured = [layer for path, layer in seen.items() if path in outcome.layers]
        known = dict(outcome.unsupported)
        known |= {p: r for p, r in self._switched_off.items() if p in seen}
        told = [*measured, *(layer for path, layer in seen.items() if path in known)]
        report = StepReport(
            step=pending.number,
            layers=outcome.layers,
            unsupported={
                **pending.selection.unsupported,
                **pending.selection.unexplained(told, known, pending.capture.why_unmeasured),
                **known,
            },
            coverage=pending.selection.coverage(measured),
            interval=self._schedule.interval,
            notes=(*self._notes, *outcome.notes),
            realised_loss_change=outcome.loss_change,
            realised_loss_changes=outcome.loss_changes,
            unmeasured=pending.selection.unmeasured(measured),
            attention=outcome.attention,
        )
        self._notes.clear()
        self._emit(report)
        for path, reason in outcome.misdescribed.items():
            self._warn(path, f"adiv_monitor: layer '{path}' is not measured: {reason}")

    def _emit(self, report: StepReport) -> None:
        failures = [
            failure
            for sink in self._sinks
            if (failure := self._guard_sink(sink, partial(sink.write, report))) is not None
        ]
        if failures:
            report = replace(report, notes=(*report.notes, *failures))
        self.reports.append(report)

    # --- which layers ----------------------------------------------------------------------------

    def _select(self) -> Selection:
        held = held_parameters(self._model, self._optimizer)  # groups may be added while training
        return select(self._model, held, self._choice)

    # --- failures --------------------------------------------------------------------------------

    def _safely(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's body; what fails there must not reach the training loop."""
        try:
            return action(*args)
        except Exception as error:
            if self._on_error == "raise":
                raise
            failure = f"The monitor failed: {type(error).__name__}: {error}"
            self._notes.append(failure)
            self._warn("step", f"adiv_monitor: {failure}; training goes on")
            return None

    def _not_realised(self, error: Exception) -> None:
        """Running a forward pass again has failed; the report says so."""
        if self._on_error == "raise":
            raise error
        failure = f"{type(error).__name__}: {error}"
        self._warn("realised", f"adiv_monitor: realised: {failure}; training goes on")

    def _switch_off(self, path: str, error: Exception) -> None:
        """An exception while measuring a layer: never again, and say so."""
        if self._on_error == "raise":
            raise error
        self._switched_off[path] = f"measuring it failed: {type(error).__name__}: {error}"
        self._warn(path, f"adiv_monitor: layer '{path}': {self._switched_off[path]}")

    def _attention_failed(self, path: str, error: Exception) -> None:
        """An exception while measuring an attention, which the report's notes tell."""
        if self._on_error == "raise":
            raise error
        self._warn(
            f"attention of {path}",
            f"adiv_monitor: attention of '{path}': measuring it failed: "
            f"{type(error).__name__}: {error}",
        )

    def _guard_sink(self, sink: Sink, action: Callable[[], None]) -> str | None:
        """Run a sink's method; its failure becomes a sentence in the report."""
        try:
            action()
        except Exception as error:
            if self._on_error == "raise":
                raise
            failure = f"{type(sink).__name__} failed: {type(error).__name__}: {error}"
            self._warn(type(sink).__name__, f"adiv_monitor: {failure}; training goes on")
            return failure
        return None

    def _warn(self, subject: str, message: str) -> None:
        if subject in self._warned:
            return
        self._warned.add(subject)
        try:
            warnings.warn(message, stacklevel=2)
        except Warning:  # where warnings are errors: not in the middle of somebody's training step
            if self._on_error == "raise":
                raise
            _logger.warning(message)


class _Armed:
    """A step to be measured, from before its forward pass to its end."""

    def __init__(self, capture: Capture, step: MeasuredStep, selection: Selection) -> None:
        self.capture = capture
        self.step = step
        self.selection = selection
        self.attempts = 0  # at the optimizer's step: one that raises may be repeated
        self.closure_calls: int | None = None  # during the last one; None: it had no closure
        self.cleanup = ExitStack()

    def gradients_final(self, optimizer: Optimizer) -> None:
        # A fused optimizer unscales AMP gradients itself; the scaler leaves the scale here.
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        self.step.skipped = found_inf if isinstance(found_inf, Tensor) else None
        self.step.gradient_is_final(scale if isinstance(scale, Tensor) else 1.0, steps=True)


class _Pending:
    """A measured step that waits for the next forward pass."""

    def __init__(
        self, step: MeasuredStep, capture: Capture, selection: Selection, number: int
    ) -> None:
        self.step = step
        self.capture = capture
        self.selection = selection
        self.number = number
        self.cleanup = ExitStack()
