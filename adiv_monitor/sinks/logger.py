"""Reports in any Lightning logger."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.products import ProductSink, product_of_logger
from adiv_monitor.sinks.scalars import Metrics
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def logger_sink(logger: "Logger", metrics: Metrics) -> Sink:
    """Return a TensorBoard sink if the logger has a TensorBoard writer, else a `LoggerSink`.

    Names in TensorBoard keep their slashes, which define its groups and identify its charts.
    """
    writer = as_writer(getattr(logger, "experiment", None))
    if writer is None:
        return LoggerSink(logger, metrics)
    return TensorBoardSink(writer, metrics.measures, scalars=metrics.scalars, name=metrics.name)


def takes_pictures(sink: Sink) -> bool:
    """Return whether the sink accepts pictures and findings."""
    return not isinstance(sink, LoggerSink) or sink.takes_pictures


class LoggerSink:
    """Writes the scalars of `TensorBoardSink` through `log_metrics`, and pictures if possible.

    Pictures, and findings as text, go through the logger's `log_image` and `log_text` (W&B) or
    through those of its client (MLflow, Comet). A logger without them, such as one that writes
    files, receives scalars only.

    Args:
        logger: a logger of `pytorch_lightning` or `lightning.pytorch`.
        metrics: choice of scalars.

    Attributes:
        takes_pictures: whether the logger accepts pictures and findings.
    """

    def __init__(self, logger: "Logger", metrics: Metrics) -> None:
        self._logger = logger
        self._metrics = metrics
        product = product_of_logger(logger)
        self.takes_pictures = product is not None
        self._board = ProductSink(product, "DivergenceCallback", metrics.name) if product else None

    @property
    def place(self) -> str:
        """Folder of a logger that writes files, for the closing line of a run; else ""."""
        return str(getattr(self._logger, "log_dir", None) or "")

    def write(self, report: StepReport) -> None:
        """Log the report's scalars at its step, and pictures when they are due."""
        self._logger.log_metrics(self._metrics.board(report), step=report.step)
        if self._board is not None:
            self._board.write(report)

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        if self._board is not None:
            self._board.add_losses(losses)

    def close(self) -> None:
        """Log the last pictures; the Trainer finalises its loggers itself."""
        if self._board is not None:
            self._board.close()
