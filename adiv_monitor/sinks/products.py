"""Logging of pictures and findings to experiment trackers."""

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import Board, alarms_text, findings_text
from adiv_monitor.sinks.scalars import summary_group


class Product(NamedTuple):
    """Functions that log pictures and texts to a tracker.

    Attributes:
        log_picture: called with key, PIL image and step.
        log_text: called with key, Markdown and step; None: the tracker does not accept texts.
    """

    log_picture: Callable[[str, Any, int], object]
    log_text: Callable[[str, str, int], object] | None


def product_of_logger(logger: Any) -> Product | None:
    """Return the product of a Lightning logger: its own methods (W&B) or its client's (MLflow)."""
    client: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):

        def log_table(key: str, text: str, step: int) -> None:
            logger.log_text(key, columns=["step", "findings"], data=[[step, text]])

        return Product(
            lambda key, picture, step: logger.log_image(key, [picture], step=step),
            log_table if hasattr(logger, "log_text") else None,
        )
    if not hasattr(client, "log_image"):
        return None
    if run := getattr(logger, "run_id", None):
        return _mlflow(client, run)
    return Product(
        lambda key, picture, step: client.log_image(picture, name=key, step=step),
        lambda key, text, step: client.log_text(text, step=step, metadata={"key": key}),
    )


def product_of_callback(callback: Any) -> Product | None:
    """Return the product of a Hugging Face callback for W&B or MLflow, once its run has begun."""
    wandb: Any = getattr(callback, "_wandb", None)
    mlflow: Any = getattr(callback, "_ml_flow", None)
    if getattr(wandb, "run", None) is not None:
        axis = "train/global_step"  # x-axis of everything that this callback logs to W&B

        def log_text(key: str, text: str, step: int) -> None:
            table = wandb.Table(columns=["step", "findings"], data=[[step, text]])
            wandb.log({key: table, axis: step})

        return Product(
            lambda key, picture, step: wandb.log({key: wandb.Image(picture), axis: step}), log_text
        )
    run = mlflow.active_run() if hasattr(mlflow, "active_run") else None
    if run is None:
        return None
    # The callback logs figures in another thread. Logging a file starts by reading the run, which
    # fails while figures are being written.
    wait = getattr(mlflow, "flush_async_logging", None)
    return _mlflow(mlflow.MlflowClient(), run.info.run_id, wait)


def _mlflow(client: Any, run: str, wait: Callable[[], None] | None = None) -> Product:
    """Return a product that writes files of the run, each replacing the last one."""

    def log(write: Callable[..., object], content: object, file: str) -> None:
        if wait is not None:
            wait()
        write(run, content, artifact_file=file)

    return Product(
        lambda key, picture, step: log(client.log_image, picture, f"{key}.png"),
        lambda key, text, step: log(client.log_text, text, f"{key}.md"),
    )


class ProductSink:
    """Logs pictures, and findings as text, to a tracker when they are due.

    Args:
        product: functions that log to the tracker.
        owner: name of the class that warns if pictures can't be drawn.
        name: distinguishes several monitors of one run, as in `TensorBoardSink`.
    """

    def __init__(self, product: Product, owner: str, name: str = "") -> None:
        self._product = product
        self._name = name
        self._board = Board(owner)
        self._last = 0

    def write(self, report: StepReport, step: int | None = None) -> None:
        """Add a report, at the tracker's step count."""
        self._last = report.step if step is None else step
        if self._board.add(report):
            self._log()

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Add the losses of the steps after the last report."""
        self._board.add_losses(losses)

    def close(self) -> None:
        """Log the last pictures."""
        if self._board.is_behind:
            self._log()

    def _log(self) -> None:
        group = summary_group(self._name)
        with self._board.showing():
            running = self._board.running
            findings = running.findings()
            if self._product.log_text is not None:
                text = alarms_text(running.alarms) + findings_text(findings, running.record())
                self._product.log_text(f"{group}/findings", text, self._last)
            if self._board.draws:
                for tag, png in self._board.pictures(findings, self._name).items():
                    self._product.log_picture(tag, _opened(png), self._last)


def _opened(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))
