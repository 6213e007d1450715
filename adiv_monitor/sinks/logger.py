"""Reports in any Lightning logger."""

from typing import TYPE_CHECKING

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.scalars import Metrics
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer
from adiv_monitor.sinks.tracker import TrackerSink

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def logger_sinks(logger: "Logger", metrics: Metrics) -> tuple[Sink, ...]:
    """Return a TensorBoard sink if the logger has a TensorBoard writer, else a `LoggerSink`.

    W&B also gets a sink of pictures and findings. Names in TensorBoard keep their slashes, which
    define its groups and identify its charts.
    """
    name, writer = metrics.name, as_writer(getattr(logger, "experiment", None))
    if writer is not None:
        return (TensorBoardSink(writer, metrics.measures, scalars=metrics.scalars, name=name),)
    numbers = LoggerSink(logger, metrics)
    is_wandb = type(logger).__name__ == "WandbLogger"
    return (numbers, TrackerSink("wandb", scalars="none", name=name)) if is_wandb else (numbers,)


class LoggerSink:
    """Writes the scalars of `TensorBoardSink` through `log_metrics` of a logger.

    Args:
        logger: a logger of `pytorch_lightning` or `lightning.pytorch`.
        metrics: choice of scalars.
    """

    def __init__(self, logger: "Logger", metrics: Metrics) -> None:
        self._logger = logger
        self._metrics = metrics

    @property
    def place(self) -> str:
        """Folder of a logger that writes files, for the closing line of a run; else ""."""
        return str(getattr(self._logger, "log_dir", None) or "")

    def write(self, report: StepReport) -> None:
        """Log the report's scalars at its step."""
        self._logger.log_metrics(self._metrics.board(report), step=report.step)

    def close(self) -> None:
        """Do nothing: the Trainer finalises its loggers itself."""
