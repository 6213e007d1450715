"""The monitor as a callback of Hugging Face's Trainer: translation only."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adiv_monitor.callback_monitor import CallbackMonitor, CallbackOptions, Settings
from adiv_monitor.sinks import Sink
from adiv_monitor.sinks.trainer import TrainerSink

try:
    from accelerate.utils import broadcast_object_list
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import IntervalStrategy
except ImportError as error:
    raise ImportError(
        "adiv_monitor.huggingface needs transformers and accelerate: "
        'pip install "adiv-monitor[huggingface]"'
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from typing_extensions import Unpack


class DivergenceTrainerCallback(TrainerCallback):
    """Monitors the optimizer of a `Trainer.train` and logs where the Trainer logs.

    The summary over layers, such as `adiv.summary/update_cosine_min`, and `adiv.summary/coverage`
    are in `trainer.state.log_history` and go to all callbacks except those that merely print
    (`MeasureSummary` says how it uses standard errors). TensorBoard, W&B, MLflow and whatever else
    the Trainer reports to also receive the layers. A report is there once the next batch or an
    evaluation has run, because until then code may still change the weights. The history counts
    completed steps: one more than the report's `step`.

    `StepReport.losses` has the loss of every step: the output of the Trainer's `training_step`,
    added up over micro-batches as the Trainer does. The "loss" that the Trainer logs is a mean over
    `logging_steps` steps, in which a loss that is not finite is replaced by default
    (`logging_nan_inf_filter`).

    With `TrainingArguments(metric_for_best_model="adiv.summary/…")` each evaluation has the latest
    value of that summary, for early stopping and the best checkpoint. The value is NaN if it has no
    direction.

    If training fails in a batch or an evaluation, the monitor is removed from the model. The
    Trainer has no event for other failures: `close()` removes it then, and so does the next
    training.

    Args:
        every_n_steps: the callback measures the optimizer steps whose number is a multiple of this.
            None: of `TrainingArguments(logging_steps=…)`, or more rarely, as `max_overhead` asks.
        **options: those of `CallbackOptions`. `realised=lambda output: output["loss"]` also
            measures how the loss changed. With `on_alarm="stop"`, `control.should_training_stop` is
            set in all ranks at the same step, once the history has a report with alarms, and one
            line of the logger `adiv_monitor` says why.

    Raises:
        ImportError: transformers or accelerate is not installed.
        TypeError: a sink is not a sink, or there is no such option.
        ValueError: there is no measure of that name. When training begins: there is no interval, no
            such layer, or no such metric.

    Attributes:
        monitor: the monitor of the current or last training, or None before the first.
    """

    def __init__(
        self, every_n_steps: int | None = None, **options: "Unpack[CallbackOptions]"
    ) -> None:
        self._every_n_steps = every_n_steps
        self._settings = Settings.of("DivergenceTrainerCallback", options, every_n_steps)
        self._trainer: Trainer | None = None  # while it trains
        self._own: dict[str, Any] = {}  # its methods, as far as they were set on it
        self._losses: list[Tensor] = []  # of the step's micro-batches so far
        self.monitor: CallbackMonitor | None = None

    # --- events of the Trainer -------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create and attach the monitor, now that the optimizer and the checkpoint are loaded."""
        self.close()  # where the last training failed
        trainer = _calling_trainer()
        self._check(trainer)
        settings = self._settings
        log: list[Sink] = [TrainerSink(trainer, settings.metrics), *settings.sinks]
        self.monitor = CallbackMonitor(
            kwargs["model"],
            kwargs["optimizer"],
            every_n_steps=self._interval(args, state),
            layers=settings.layers,
            sinks=log if state.is_world_process_zero else (),
            **settings.monitor,
        )
        self.monitor.step = state.global_step  # a resumed training counts on
        self.monitor.attach()
        self._trainer = trainer
        self._losses.clear()
        self._own = {name: vars(trainer).get(name) for name in _WORK}
        for name in _WORK:
            method = getattr(trainer, name)
            setattr(trainer, name, _watched(method, self.close, self._note_loss))

    def _note_loss(self, loss: Any) -> None:
        if self._trainer is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the loss of the step: the sum over its micro-batches."""
        if self.monitor is not None and self._losses:
            self.monitor.log_loss(torch.stack(self._losses).sum())
        self._losses.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the training if an alarm does."""
        self._stop(control)

    def _stop(self, control: "TrainerControl") -> None:
        if self.monitor is not None and self.monitor.alarmed is not None:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metric that early stopping and the best checkpoint follow, if it is a summary."""
        self._stop(control)
        metric = _followed(args)
        if metric is None or self.monitor is None:
            return
        self.monitor.complete_report()
        latest = self.monitor.latest
        metrics = self._settings.metrics
        # All must come to the same decision, be it that one of them has not heard of the report.
        named = {} if latest is None else metrics.named(metrics.summary(latest))
        (value,) = broadcast_object_list([named.get(metric, math.nan)])
        kwargs["metrics"][f"eval_{metric}"] = value

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the last report while the Trainer's loggers are open."""
        if control.should_training_stop:
            self.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the monitor."""
        self.close()

    def close(self) -> None:
        """Complete the current report and remove the monitor; calling it again does nothing."""
        trainer, self._trainer = self._trainer, None
        for name, own in self._own.items() if trainer is not None else ():
            delattr(trainer, name) if own is None else setattr(trainer, name, own)
        if self.monitor is not None:
            self.monitor.close()

    # --- settings of the Trainer ------------------------------------------------------------------

    def _interval(self, args: "TrainingArguments", state: "TrainerState") -> int:
        if self._every_n_steps is not None:
            return self._every_n_steps
        strategy = IntervalStrategy(args.logging_strategy)
        if strategy != IntervalStrategy.STEPS:
            raise ValueError(
                "DivergenceTrainerCallback: every_n_steps=None follows logging_steps, but got "
                f"TrainingArguments(logging_strategy={strategy.value!r}), which has "
                "none; expected DivergenceTrainerCallback(every_n_steps=1) or more"
            )
        return int(state.logging_steps)

    def _check(self, trainer: Trainer) -> None:
        """Raise ValueError for a metric that the monitor will not provide in time."""
        metric = _followed(trainer.args)
        if metric is None:
            return
        there = self._settings.metrics.to_follow(self._settings.monitor)
        if metric not in there:
            raise ValueError(
                f"DivergenceTrainerCallback: got metric_for_best_model={metric!r}, expected one of "
                f"{', '.join(there)}"
            )


def _followed(args: "TrainingArguments") -> str | None:
    """Return the name of the best model's metric if the monitor provides it; else None."""
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    return metric if metric.startswith("adiv.") else None


def _calling_trainer() -> Trainer:
    """Return the Trainer whose event is handled, from the stack: events do not name it."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
    raise ValueError(
        "DivergenceTrainerCallback: got an event that was not called by a transformers.Trainer, "
        "expected one that was; in a loop of your own, use adiv_monitor.Monitor"
    )


# --- failures and losses, for which the Trainer has no event -------------------------------------

_WORK = ("get_batch_samples", "training_step", "evaluate")


def _watched(
    method: Callable[..., Any], failed: Callable[[], None], returned: Callable[[Any], None]
) -> Callable[..., Any]:
    """Return a method of the Trainer that passes its results on, and says if it fails."""

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            given = method(*args, **kwargs)
        except BaseException:
            failed()
            raise
        returned(given)
        return given

    return watched
