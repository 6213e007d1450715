"""Reports in the log of a Hugging Face Trainer and in the trackers that it reports to."""

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.scalars import Metrics
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


class TrainerSink:
    """Logs through a Trainer's history and callbacks, for one training.

    The summary over layers, and the coverage, go into `trainer.state.log_history` and to all
    callbacks except those that only print logs. Scalars of single layers would flood the history,
    so only callbacks that report to a tracker receive them. TensorBoard also receives all else that
    `TensorBoardSink` writes.

    Args:
        trainer: the Trainer, which has begun to train.
        metrics: choice of scalars. Names in TensorBoard keep the slash, which defines its groups.
    """

    def __init__(self, trainer: "Trainer", metrics: Metrics) -> None:
        self._trainer = trainer
        self._state = trainer.state  # state of this training; the next one has another
        self._metrics = metrics
        self._board: TensorBoardSink | None = None

    @property
    def place(self) -> str:
        """Folder of TensorBoard's event files, for the closing line; "" without TensorBoard."""
        return "" if self._board is None else self._board.place

    def write(self, report: StepReport) -> None:
        """Log the report at the number of steps that the Trainer has taken."""
        from transformers import PrinterCallback, ProgressCallback
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        trackers: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
        metrics = self._metrics
        summary = metrics.named(metrics.summary(report))
        summary["epoch"] = self._state.epoch
        shown = metrics.board(report)
        # `trainer.log` is not used: trainers that override it log means, which it would restart.
        self._state.log_history.append({**summary, "step": self._state.global_step})
        for callback in self._trainer.callback_handler.callbacks:
            writer = as_writer(getattr(callback, "tb_writer", None))
            if writer is not None:
                self._board = self._board or TensorBoardSink(
                    writer, metrics.measures, scalars=metrics.scalars
                )
                self._board.write(report)
            elif isinstance(callback, trackers):
                self._tell(callback, {**shown, "epoch": self._state.epoch})
            elif not isinstance(callback, (PrinterCallback, ProgressCallback)):
                self._tell(callback, dict(summary))

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        if self._board is not None:
            self._board.add_losses(losses)

    def close(self) -> None:
        """Write the last pictures; their writer belongs to the Trainer and stays open."""
        if self._board is not None:
            self._board.close()

    def _tell(self, callback: "TrainerCallback", logs: dict[str, float]) -> None:
        """Pass logs to a callback in the way the Trainer does."""
        handler = copy(self._trainer.callback_handler)
        handler.callbacks = [callback]
        control = self._trainer.control
        # `on_log` clears `should_log`, which the Trainer may still need for its own losses.
        wished = control.should_log
        handler.on_log(self._trainer.args, self._state, control, logs)
        control.should_log = wished
