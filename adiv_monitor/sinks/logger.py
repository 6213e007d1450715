"""Reports in a Lightning logger, of whatever product."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.products import ProductSink, product_of_logger
from adiv_monitor.sinks.scalars import Scalars, board_scalars, separated
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def logger_sink(
    logger: "Logger",
    measures: tuple[str, ...] | None,
    name: str,
    scalars: Scalars = "few",
    separator: str = "/",
) -> Sink:
    """A TensorBoard sink where the logger has a TensorBoard writer, else what the logger takes.

    TensorBoard's names keep their slashes, which make its groups, and by which its charts are
    found.
    """
    writer = as_writer(getattr(logger, "experiment", None))
    if writer is None:
        return LoggerSink(logger, measures, name, scalars, separator)
    return TensorBoardSink(writer, measures, scalars=scalars, name=name)


def takes_pictures(sink: Sink) -> bool:
    """Whether pictures and findings go there."""
    return not isinstance(sink, LoggerSink) or sink.takes_pictures


class LoggerSink:
    """Writes the scalars of `TensorBoardSink` through `log_metrics`, pictures where it can.

    Pictures, and findings as text, go through the logger's `log_image` and `log_text`, as W&B's
    have them, or through its client's, as MLflow's and Comet's have them. A logger without them,
    such as one of files, gets scalars only.

    Args:
        logger: a logger of `pytorch_lightning` or `lightning.pytorch`.
        measures: which measures, by name; None: the defaults.
        name: tells several monitors of one run apart, as in `TensorBoardSink`.
        scalars: "few", or "all" for every layer's.
        separator: stands for the slash in the names of scalars.

    Attributes:
        takes_pictures: whether the logger gets pictures and findings, too.
    """

    def __init__(
        self,
        logger: "Logger",
        measures: tuple[str, ...] | None,
        name: str = "",
        scalars: Scalars = "few",
        separator: str = "/",
    ) -> None:
        self._logger = logger
        self._measures = measures
        self._name = name
        self._scalars = scalars
        self._separator = separator
        product = product_of_logger(logger)
        self.takes_pictures = product is not None
        self._board = ProductSink(product, "DivergenceCallback", name) if product else None

    def write(self, report: StepReport) -> None:
        """Log the report's scalars at its step, and pictures when they are due."""
        scalars = board_scalars(report, self._measures, self._scalars, self._name)
        named = {separated(tag, self._separator): value for tag, value in scalars.items()}
        self._logger.log_metrics(named, step=report.step)
        if self._board is not None:
            self._board.write(report)

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Take the losses of the steps after the last report."""
        if self._board is not None:
            self._board.add_losses(losses)

    def close(self) -> None:
        """Log the last pictures; the Trainer finalises its loggers."""
        if self._board is not None:
            self._board.close()
