"""Reports in the log of a Hugging Face Trainer, and wherever that reports to."""

import warnings
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.products import ProductSink, product_of_callback
from adiv_monitor.sinks.scalars import Metrics
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


class TrainerSink:
    """Logs through a Trainer's history and callbacks, for one training.

    The summary over layers, and the coverage, go into `trainer.state.log_history` and to all
    callbacks that don't merely print logs. What each layer says would flood the history: it goes to
    those that report to some product, to TensorBoard in the way of `TensorBoardSink`. W&B and
    MLflow get its pictures and findings, too; other products numbers alone, which is said once.

    Args:
        trainer: the Trainer, which has begun to train.
        metrics: which scalars. TensorBoard's names keep their slash, which makes its groups.
    """

    def __init__(self, trainer: "Trainer", metrics: Metrics) -> None:
        self._trainer = trainer
        self._state = trainer.state  # of this training: the next one has another
        self._metrics = metrics
        self._board: TensorBoardSink | None = None
        self._products: dict[int, ProductSink | None] = {}  # by id of the callback

    def write(self, report: StepReport) -> None:
        """Log the report at the number of steps that the Trainer has taken."""
        from transformers import PrinterCallback, ProgressCallback
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        products: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
        metrics = self._metrics
        summary = metrics.named(metrics.summary(report))
        summary["epoch"] = self._state.epoch
        shown = metrics.board(report)
        # Not by `trainer.log`: trainers that override it log means, which would begin anew with it.
        self._state.log_history.append({**summary, "step": self._state.global_step})
        for callback in self._trainer.callback_handler.callbacks:
            writer = as_writer(getattr(callback, "tb_writer", None))
            if writer is not None:
                self._board = self._board or TensorBoardSink(
                    writer, metrics.measures, scalars=metrics.scalars
                )
                self._board.write(report)
            elif isinstance(callback, products):
                self._tell(callback, {**shown, "epoch": self._state.epoch})
                if (product := self._product(callback)) is not None:
                    product.write(report, self._state.global_step)
            elif not isinstance(callback, (PrinterCallback, ProgressCallback)):
                self._tell(callback, dict(summary))

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Take the losses of the steps after the last report."""
        for board in (self._board, *self._products.values()):
            if board is not None:
                board.add_losses(losses)

    def close(self) -> None:
        """Write the last pictures; what they are written to belongs to the Trainer."""
        for board in (self._board, *self._products.values()):
            if board is not None:
                board.close()

    def _product(self, callback: "TrainerCallback") -> ProductSink | None:
        if id(callback) not in self._products:
            product, name = product_of_callback(callback), type(callback).__name__
            if product is None:
                warnings.warn(
                    f"DivergenceTrainerCallback: {name} takes numbers alone; for findings and heat "
                    "maps: DivergenceTrainerCallback(sinks=[HtmlSink('run.html')])",
                    stacklevel=2,
                )
            own = "DivergenceTrainerCallback"
            self._products[id(callback)] = ProductSink(product, own) if product else None
        return self._products[id(callback)]

    def _tell(self, callback: "TrainerCallback", logs: dict[str, float]) -> None:
        """As the Trainer tells its callbacks of a log."""
        handler = copy(self._trainer.callback_handler)
        handler.callbacks = [callback]
        control = self._trainer.control
        # A log takes back the wish for one, which the Trainer's own losses may still wait for.
        wished = control.should_log
        handler.on_log(self._trainer.args, self._state, control, logs)
        control.should_log = wished
