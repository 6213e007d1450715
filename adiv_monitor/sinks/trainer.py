"""Reports in the log of a Hugging Face Trainer and in the trackers that it reports to."""

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.scalars import Metrics
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer
from adiv_monitor.sinks.tracker import TrackerSink

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


class TrainerSink:
    """Logs through a Trainer's history and callbacks, for one training.

    The summary over layers, and the coverage, go into `trainer.state.log_history` and to all
    callbacks except those that only print logs. Scalars of single layers would flood the history,
    so only callbacks that report to a tracker receive them. TensorBoard, trackio and W&B also
    receive all else that `TensorBoardSink` and `TrackerSink` write.

    Args:
        trainer: the Trainer, which has begun to train.
        metrics: choice of scalars. Names in TensorBoard keep the slash, which defines its groups.
    """

    def __init__(self, trainer: "Trainer", metrics: Metrics) -> None:
        self._trainer = trainer
        self._state = trainer.state  # state of this training; the next one has another
        self._metrics = metrics
        self._boards: dict[TrainerCallback, TensorBoardSink | TrackerSink] = {}

    @property
    def place(self) -> str:
        """Folder of TensorBoard's event files, for the closing line; "" without TensorBoard."""
        return next((p for b in self._boards.values() if (p := getattr(b, "place", ""))), "")

    def write(self, report: StepReport) -> None:
        """Log the report at the number of steps that the Trainer has taken."""
        from transformers import PrinterCallback, ProgressCallback
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        trackers: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
        metrics = self._metrics
        summary = metrics.named(metrics.summary(report)) | {"epoch": self._state.epoch}
        shown = metrics.board(report)
        # `trainer.log` is not used: trainers that override it log means, which it would restart.
        self._state.log_history.append({**summary, "step": self._state.global_step})
        for callback in self._trainer.callback_handler.callbacks:
            board = self._board_of(callback)
            if board is not None:
                board.write(report)
            if isinstance(board, TensorBoardSink):
                continue
            if isinstance(callback, trackers):
                self._tell(callback, {**shown, "epoch": self._state.epoch})
            elif not isinstance(callback, (PrinterCallback, ProgressCallback)):
                self._tell(callback, dict(summary))

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        for board in self._boards.values():
            board.add_losses(losses)

    def close(self) -> None:
        """Write the last pictures; their writers belong to the Trainer and stay open."""
        for board in self._boards.values():
            board.close()

    def _board_of(self, callback: "TrainerCallback") -> TensorBoardSink | TrackerSink | None:
        """Return the sink for the product that the callback reports to, if it takes pictures."""
        if callback not in self._boards:
            writer = as_writer(getattr(callback, "tb_writer", None))
            names = [p for p in ("trackio", "wandb") if getattr(callback, f"_{p}", None)]
            if writer is not None:
                measures, scalars = self._metrics.measures, self._metrics.scalars
                self._boards[callback] = TensorBoardSink(writer, measures, scalars=scalars)
            elif names:
                self._boards[callback] = TrackerSink(names[0], scalars="none")
        return self._boards.get(callback)

    def _tell(self, callback: "TrainerCallback", logs: dict[str, float]) -> None:
        """Pass logs to a callback in the way the Trainer does."""
        handler = copy(self._trainer.callback_handler)
        handler.callbacks = [callback]
        control = self._trainer.control
        # `on_log` clears `should_log`, which the Trainer may still need for its own losses.
        wished = control.should_log
        handler.on_log(self._trainer.args, self._state, control, logs)
        control.should_log = wished
