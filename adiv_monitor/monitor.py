"""When to measure, which layers, and where the reports go: the monitor."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.alarms import Rules
from adiv_monitor.arguments import (
    DEFAULT_MAX_OVERHEAD,
    DEFAULT_MAX_ROWS,
    check_choice,
    check_reports,
    check_schedule,
    check_step,
    check_training,
)
from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import LayerChoice
from adiv_monitor.errors import AdivError, AlarmError
from adiv_monitor.outlet import Outlet
from adiv_monitor.report import StepReport
from adiv_monitor.rerun.thread import apart
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.step.controller import StepController
from adiv_monitor.step.failures import Failures
from adiv_monitor.step.own_measures import OwnMeasure
from adiv_monitor.step.schedule import Schedule
from adiv_monitor.step.stepping import is_within_own_step, stepping
from adiv_monitor.step.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from adiv_monitor.alignment.probe import Probe

_attached: WeakSet["Monitor"] = WeakSet()


class Monitor:
    """Measures what an optimizer step does to the activations of each layer, every so many steps.

    The monitored run is bit-identical to the unmonitored one. Between measured steps the model has
    no hooks, unless `loss` is a module; the optimizer has two, before and after its step. Steps are
    optimizer steps, counted from 0, and the first one is always measured.

    A report is complete when the next optimizer step begins, because until then code may still
    change the weights; then it goes to the sinks. On a single rank `reports`, `latest`, `plot` and
    `complete_report` complete it at once. At the latest it is complete when the monitor is closed.

    With several ranks, create a monitor in each. A report then covers the rows of all ranks; all
    ranks have it, and rank 0 writes it to its sinks.

    Args:
        model: the model that is trained.
        optimizer: the optimizer whose steps are measured: any `torch.optim.Optimizer`, or a wrapper
            that holds one as its attribute `optimizer` and runs no hooks. None: the monitor
            measures the gradient alone, and `end_step()` marks each step.
        every_n_steps: the monitor measures the steps whose number is a multiple of this, whatever
            that costs, unless `max_overhead` is given, too. None: it measures steps 0, 10 and 100,
            then at most every 100th.
        max_overhead: the share of the training time that further measured steps may take. The
            monitor times some steps and chooses the smallest interval that keeps to the share,
            rounded up to 1, 2 or 5 times a power of ten, but not below `every_n_steps` nor below
            20. All ranks measure at the interval of rank 0. None: the choice of steps depends on no
            clock.
        layers: glob patterns over module paths, or a predicate (path, module) → bool. None: all.
        layers_per_step: the number of modules that are measured in one step, in turn. Use it for
            models of which no second copy fits into memory: the parameters of other layers are not
            copied. Each report is of those layers (`StepReport.turn`). Not allowed with `realised`
            and `alignment`, which copy all parameters. None: all layers in every measured step.
        max_rows: the number of rows that are sampled per layer and step, of all ranks together.
            None: all rows.
        attainable: also measure `attainable_cosine`, the best that any step of the layer could
            reach. All rows are measured then, whatever `max_rows` is.
        attention: also measure the attention scores (`StepReport.attention`), on the probe of
            `realised`. Their cosines need `loss` or the loss in `realised`.
        realised: run the model on a probe, the first eight samples of the first measured step, with
            the weights before each measured step, with those after it and with half of the step, to
            measure what really changed (`single_layer_share`, `first_order_error`). With the loss,
            here or in `loss`, also `realised_cosine` and the change of the loss
            (`StepReport.realised_loss_change`): the module that computes it from the model's
            output, or a function from the output of a call of the model to the loss, one number or
            one per sample. It costs four passes on the probe and a copy of the parameters.
            Forward hooks run again too. Random numbers, buffers, tensors and plain data in
            attributes of modules, gradients, modes and weights are restored; what else a forward
            pass changes is not.
        loss: the loss, for `StepReport.losses`: the module that computes it, in the model or
            outside, or a function from the output of a call of the model to the loss. A module
            keeps one hook between measured steps and counts outputs with gradients, so evaluate
            under `torch.no_grad()`; in compiled code it is seen in measured steps only. A function
            is called in measured steps only, and must not draw random numbers. Several losses of a
            step (of samples, of micro-batches) count as their mean. `log_loss` takes precedence. A
            note in the report says what to pass if no loss was seen, as where the loop calls
            another module. None: the loss that `realised` names, if any.
        alignment: a `Probe`, a batch that runs through the model after each measured step to
            measure how weights, updates and activations are aligned (`StepReport.alignment`). The
            reference is the weights at `attach`, or those of the run that is resumed.
        own_measures: name → a function of the sampled rows of a layer (`OwnRows`: Φ, G, z, weight
            and update, as tensors on their device) to a number, for `LayerReading.own`. It is
            called right after the step for each layer with plain rows z = W φ (linear layers,
            convolutions without groups), without gradients, and must not draw random numbers. If it
            raises an exception the value is NaN, and a note says why. Of several ranks the reading
            is the mean, weighted by their sampled rows.
        spectral: also measure, where `own_measures` are and as some of them, the largest singular
            value σ₁ and the stable rank ‖·‖²/σ₁² of weights and updates (`update_sigma`,
            `update_stable_rank`, `weight_sigma`, `weight_stable_rank`). Each takes 62 products with
            the matrix.
        watch: "loss": where the loss is known, a spike makes the next two steps measured ones, at
            most once in an interval, and `StepReport.spikes` says which layers moved most then: a
            loss that is not finite, or eight standard deviations above those before it. With
            several ranks no further steps are measured. "norms": also the norms of gradient and
            update of every step, which cost about ten launches and a copy of the parameters. Not
            where parameters are sharded. None: nothing is watched.
        alarms: rules such as "projection_cosine < 0" or "encoder.*: update_ratio > 0.5", with a
            glob pattern over layers; "non_finite"; or functions from a layer's path and reading to
            bool. If a rule holds by more than two standard errors, the report and every sink have
            it (`StepReport.alarms`), and the first time it warns. "default", alone or in the list,
            stands for values that no healthy layer reads.
        on_alarm: "warn", or "stop": once the sinks have the report, the hooks are removed and
            `AlarmError` is raised, whatever `on_error` is, where the report is completed: in the
            next optimizer step (with several ranks: in all of them), or where somebody asks for it.
            After it the monitor measures nothing more. Closing the monitor ends the training, so
            the alarms of a last report warn.
        sinks: where reports go. They are closed with the monitor.
        keep: the number of reports that `reports` holds.
        on_error: "warn": an exception inside the monitor switches off the layer with a warning, and
            training continues. "raise": it is raised.
        seed: the seed of the choice of rows.

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
        every_n_steps: int | None = None,
        max_overhead: float | None = DEFAULT_MAX_OVERHEAD,
        layers: LayerChoice = None,
        layers_per_step: int | None = None,
        max_rows: int | None = DEFAULT_MAX_ROWS,
        attainable: bool = False,
        attention: bool = False,
        realised: bool | LossOf = False,
        loss: LossOf | None = None,
        alignment: "Probe | None" = None,
        own_measures: Mapping[str, OwnMeasure] | None = None,
        spectral: bool = False,
        watch: Literal["loss", "norms"] | None = "loss",
        alarms: Rules = (),
        on_alarm: Literal["warn", "stop"] = "warn",
        sinks: Sequence[Sink] = (),
        keep: int = 100,
        on_error: Literal["warn", "raise"] = "warn",
        seed: int = 0,
    ) -> None:
        optimizer = stepping(optimizer)
        asked = max_rows, attainable, attention, realised, loss, alignment, own_measures
        training = Training(model, optimizer, layers, layers_per_step, *asked, spectral, watch)
        check_training(training)
        check_schedule(every_n_steps, max_overhead, seed)
        check_reports(sinks, keep, alarms, on_alarm, on_error)
        self.step = 0
        self._training = training
        self._stops = on_alarm == "stop"
        self._generator = np.random.default_rng(seed)
        self._failures = Failures(on_error)
        self._outlet = Outlet(sinks, alarms, keep, self._failures)
        self._schedule = Schedule(every_n_steps, max_overhead)
        self._controller = StepController(
            training, self._generator, self._schedule, self._failures, self._now, self._emit
        )
        self._state: Literal["new", "attached", "stopped", "closed"] = "new"
        self._is_alone = True  # no other monitor was attached at the same time
        self._hooks: list[RemovableHandle] = []  # on the optimizer
        self._is_captured = False  # the current step, by a CUDA graph
        selection = training.selection()
        check_choice(selection, model, layers)
        self._paths = " ".join(selection.paths)

    def _now(self) -> int:
        return self.step

    @property
    def reports(self) -> list[StepReport]:
        """The last reports, at most `keep` of them.

        On a single rank they include that of the last measured step: see `complete_report`.
        """
        if self._controller.ranks.is_alone:
            self.complete_report()
        return self._outlet.reports

    @property
    def latest(self) -> StepReport | None:
        """The last of `reports`, or None before the first one."""
        return next(reversed(self.reports), None)

    def plot(self, measure: str | None = None) -> "Figure":
        """Return a matplotlib figure of the run so far: a heat map of layers × steps.

        Args:
            measure: a measure of the reports, such as "update_ratio" or "alpha", or "gradient".
                None: the overview, with the verdict in words.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no such measure, no layer has it, or there is no report yet.
        """
        from adiv_monitor.sinks.plots import run_figure

        _ = self.reports
        return run_figure(self._outlet.running, measure)

    def __enter__(self) -> "Monitor":
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            try:
                unstepped = self._failures.safely(self._controller.unstepped)
            finally:  # where this one raised, other ranks may be gone as well
                self._close(patience=None if kind is None else 0.0)
        except BaseException:  # it may have come before closing had begun
            self._close(patience=0.0)
            raise
        if kind is None and unstepped:
            self._failures.warn("no step", f"adiv_monitor: {unstepped}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle; an attached monitor has neither."""
        if self._state == "attached":
            raise AdivError(
                "Monitor: got a copy, or a pickle, of a monitor that is attached, expected none: "
                "it holds hooks on its model; create a new Monitor for the copy of the model"
            )
        return {**vars(self), "_hooks": []}  # they belong to the optimizer of the original

    def attach(self) -> None:
        """Start to measure, with the next optimizer step.

        Raises:
            AdivError: the monitor is attached already, or was closed.
        """
        if self._state != "new":
            raise AdivError(
                f"Monitor.attach: got a monitor that is {self._state}, expected a new one; "
                "make another Monitor to measure again"
            )
        self._state = "attached"
        try:
            self._attach()
        except BaseException:  # nobody is going to close what was never attached
            self._close(patience=0.0)
            raise

    def _attach(self) -> None:
        _attached.add(self)
        for each in _attached if len(_attached) > 1 else ():
            each._is_alone = False
        if self._training.optimizer is not None:
            # A compiled optimizer step must not trace them.
            bodies = self._before_step, self._after_step
            before, after = (Hook(body) for body in map(torch.compiler.disable, bodies))
            self._hooks.append(self._training.optimizer.register_step_pre_hook(before))
            self._hooks.append(self._training.optimizer.register_step_post_hook(after))
        self._failures.safely(self._controller.begin, self._paths)

    def close(self, *, quietly: bool = False) -> None:
        """Complete the current report, remove every hook and close the sinks.

        Calling it again does nothing. The logger `adiv_monitor` reports in one line what was found,
        and where it is shown: as a warning, or as information if nothing is to be fixed or watched.
        The line names the optimizer if other monitors were attached at the same time.

        Args:
            quietly: leave out that line.
        """
        self._close(patience=None, quietly=quietly)

    def _close(self, patience: float | None, *, quietly: bool = False) -> None:
        try:
            if self._state != "closed":
                self._state = "closed"
                _attached.discard(self)
                call_all(
                    partial(self._guarded, self._controller.end, patience),
                    partial(self._failures.safely, self._take_off),
                    partial(self._failures.safely, self._add_last_losses),
                    *self._outlet.closings("" if self._is_alone else self._name(), quietly=quietly),
                )
        finally:  # again: closing may have been interrupted, now or when it was called before
            self._take_off()

    def _name(self) -> str:
        """Return what tells this monitor from others in their closing lines."""
        return self._training.name

    def _add_last_losses(self) -> None:
        self._outlet.add_last_losses(self._controller.losses.take(self.step)[0])

    def _take_off(self) -> None:
        """Remove every hook that is set; it can be called again if it was interrupted."""
        call_all(self._controller.leave, *[hook.remove for hook in self._hooks])

    def _guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run an action within the training; an exception that leaves it removes all hooks."""
        try:
            with apart(functions=True):
                return self._failures.safely(action, *args)
        except BaseException:
            self._controller.release()
            raise

    def log_loss(self, value: float | Tensor, step: int | None = None) -> None:
        """Record the loss of a step; call it before `optimizer.step()`.

        Reports have the losses of all steps, not only of measured ones (`StepReport.losses`). It
        does not wait for a device: a tensor is copied on its device and read when the next report
        is made. Between two reports the last 16,384 values are kept. Several values of one step,
        such as those of micro-batches, or of a closure that the optimizer calls several times,
        count as their mean. After `close` and in compiled code nothing is recorded.

        Args:
            value: a number, or a tensor; a tensor of several values counts as their mean.
            step: the number of the optimizer step. None: the next one, or the current one.

        Raises:
            TypeError, ValueError: the value is not a number, or the step is not one.
        """
        if torch.compiler.is_compiling() or self._state == "closed":
            return
        number = check_step(self.step if step is None else step)
        self._controller.losses.add(number, value, is_said=True)

    def end_step(self) -> None:
        """Mark the end of a step of a monitor without an optimizer, when gradients are complete.

        Raises:
            AdivError: the monitor has an optimizer, which marks its steps itself, or is not
                attached.
            AlarmError: with `on_alarm="stop"`, if the report has alarms.
        """
        has_optimizer = self._training.optimizer is not None
        if has_optimizer or self._state != "attached":
            raise AdivError(
                f"Monitor.end_step: got a monitor that is {self._state}"
                f"{' and has an optimizer' if has_optimizer else ''}, expected an "
                "attached one with optimizer=None; an optimizer marks its steps itself"
            )
        try:
            self._guarded(self._controller.step_ends)
        except AlarmError:  # by the report of this very step, which was taken
            self.step += 1
            raise
        self._count()

    def complete_report(self) -> None:
        """Complete the report of the last measured step now, before the next step begins.

        What code changes in the weights afterwards is not in it. With several ranks, call it in all
        of them. It waits for their contributions for at most ten seconds.

        Raises:
            AlarmError: with `on_alarm="stop"`, if the report has alarms.
        """
        self._guarded(self._controller.read)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue counting steps, without reports."""
        return {
            "step": self.step,
            "generator": self._generator.bit_generator.state,
            **self._schedule.state(),
            "alignment": self._controller.reference(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting steps from a saved state; call it before `attach`.

        Raises:
            AdivError: the monitor is attached already.
            ValueError: the state was not returned by `state_dict`.
        """
        if self._state != "new":
            raise AdivError(
                f"Monitor.load_state_dict: got a monitor that is {self._state}, expected a new "
                "one; call it before attach()"
            )
        is_state = isinstance(state, Mapping) and state.keys() >= {"step", "generator"}
        if not is_state or int(state["step"]) < 0:
            got = sorted(state) if isinstance(state, Mapping) else state
            raise ValueError(
                f"Monitor.load_state_dict: got {got!r}, expected what Monitor.state_dict() "
                "returns, with at least a 'step' and the state of a 'generator'"
            )
        self.step = int(state["step"])
        self._generator.bit_generator.state = state["generator"]
        self._schedule.resume(state.get("costs", ()), state.get("turns", 0))
        self._controller.resume(state.get("alignment"))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run before every optimizer step."""
        return self._guarded(self._step_begins, optimizer, args, kwargs)

    def _step_begins(self, optimizer: Optimizer, *given: Any) -> Any:
        if is_within_own_step(optimizer):
            return None
        self._is_captured = self._failures.tell_of_capture()
        if self._is_captured:
            self._controller.release()  # replays would move what waits for its report
            return None
        return self._controller.step_begins(optimizer, *given)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run after every optimizer step."""
        self._guarded(self._step_ends, optimizer)

    def _step_ends(self, optimizer: Optimizer) -> None:
        if is_within_own_step(optimizer) or self._is_captured:
            return
        try:
            self._controller.step_ends()
        finally:
            self._count()

    def _count(self) -> None:
        self.step += 1
        if self._failures.safely(self._schedule.step_ended, self.step):
            self._failures.safely(self._controller.arm)

    def _emit(self, report: StepReport, writes: bool) -> None:
        if (last := self._outlet.take(report, writes, self._ends_training)) is not None:
            self._stop(AlarmError(last))

    def _ends_training(self, report: StepReport) -> bool:
        """Return whether alarms end the training; all ranks return the same."""
        is_asked = self._stops and self._state == "attached"
        return is_asked and self._controller.ranks.all_stop(report.step)

    def _stop(self, error: AlarmError) -> None:
        """End the training by an exception that is raised in a hook."""
        self._state = "stopped"
        self._take_off()
        raise error
