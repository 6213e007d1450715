"""Reports in a Lightning logger, of whatever product."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import Board, findings_text
from adiv_monitor.sinks.scalars import Scalars, board_scalars
from adiv_monitor.sinks.sink import Sink
from adiv_monitor.sinks.tensorboard import TensorBoardSink, as_writer

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def logger_sink(
    logger: "Logger", measures: tuple[str, ...] | None, name: str, scalars: Scalars = "few"
) -> Sink:
    """A TensorBoard sink where the logger has a TensorBoard writer, else what the logger takes."""
    writer = as_writer(getattr(logger, "experiment", None))
    if writer is None:
        return LoggerSink(logger, measures, name, scalars)
    return TensorBoardSink(writer, measures, scalars=scalars, name=name)


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
    """

    def __init__(
        self,
        logger: "Logger",
        measures: tuple[str, ...] | None,
        name: str = "",
        scalars: Scalars = "few",
    ) -> None:
        self._logger = logger
        self._measures = measures
        self._name = name
        self._scalars = scalars
        self._log_picture = _picture_log(logger)
        self._board = Board("DivergenceCallback") if self._log_picture else None
        self._last = 0

    def write(self, report: StepReport) -> None:
        """Log the report's scalars at its step, and pictures when they are due."""
        scalars = board_scalars(report, self._measures, self._scalars, self._name)
        self._logger.log_metrics(scalars, step=report.step)
        self._last = report.step
        if self._board is not None and self._board.add(report):
            self._log_board(self._board)

    def close(self) -> None:
        """Log the last pictures; the Trainer finalises its loggers."""
        if self._board is not None and self._board.is_behind:
            self._log_board(self._board)

    def _log_board(self, board: Board) -> None:
        findings = board.findings()
        name = f".{self._name}" if self._name else ""
        if log_text := _text_log(self._logger):
            log_text(f"adiv.summary{name}/findings", findings_text(findings), self._last)
        if board.draws and self._log_picture:
            for tag, png in board.pictures(findings, self._name).items():
                self._log_picture(tag, _opened(png), self._last)
        board.shown()


_Log = Callable[[str, Any, int], object]


def _picture_log(logger: Any) -> _Log | None:
    """How this logger takes a picture; None: it does not."""
    if hasattr(logger, "log_image"):  # W&B
        return lambda key, picture, step: logger.log_image(key, [picture], step=step)
    client: Any = getattr(logger, "experiment", None)
    if hasattr(client, "log_image"):
        if run := getattr(logger, "run_id", None):  # MLflow
            return lambda key, picture, step: client.log_image(
                run, picture, artifact_file=f"{key}.png"
            )
        return lambda key, picture, step: client.log_image(picture, name=key, step=step)  # Comet
    return None


def _text_log(logger: Any) -> _Log | None:
    """How this logger takes a text; None: it does not."""
    if hasattr(logger, "log_text"):  # W&B
        return lambda key, text, step: logger.log_text(
            key, columns=["step", "findings"], data=[[step, text]]
        )
    client: Any = getattr(logger, "experiment", None)
    if hasattr(client, "log_text"):
        if run := getattr(logger, "run_id", None):  # MLflow
            return lambda key, text, step: client.log_text(run, text, artifact_file=f"{key}.md")
        return lambda key, text, step: client.log_text(text, step=step, metadata={"key": key})
    return None


def _opened(png: bytes) -> Any:
    from PIL import Image  # comes with matplotlib, which has drawn it

    return Image.open(io.BytesIO(png))
