"""Reports in a Lightning logger, of whatever product."""

from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.scalars import layer_scalars, summary_scalars
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def logger_sink(logger: "Logger", measures: tuple[str, ...], name: str) -> Sink:
    """A TensorBoard sink where the logger has a TensorBoard writer, else scalars."""
    writer = as_writer(getattr(logger, "experiment", None))
    if writer is None:
        return LoggerSink(logger, measures, name)
    return TensorBoardSink(writer, measures, name=name)


class LoggerSink:
    """Writes scalars through `log_metrics`, under the tags of `TensorBoardSink`.

    Args:
        logger: a logger of `pytorch_lightning` or `lightning.pytorch`.
        measures: which measures, by name.
        name: tells several monitors of one run apart, as in `TensorBoardSink`.
    """

    def __init__(self, logger: "Logger", measures: tuple[str, ...], name: str = "") -> None:
        self._logger = logger
        self._measures = measures
        self._name = name

    def write(self, report: StepReport) -> None:
        """Log the report's scalars at its step."""
        scalars = layer_scalars(report, self._measures)
        summary = summary_scalars(report, self._measures, self._name)
        self._logger.log_metrics({**scalars, **summary}, step=report.step)

    def close(self) -> None:
        """Nothing to finish: the Trainer finalises its loggers."""
