"""How loggers of experiment tracking take pictures and findings, of whatever product."""

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import Board, alarms_text, findings_text


class Product(NamedTuple):
    """Where pictures and texts go.

    Attributes:
        log_picture: key, a PIL image, step.
        log_text: key, Markdown, step; None: there is no place for texts.
    """

    log_picture: Callable[[str, Any, int], object]
    log_text: Callable[[str, str, int], object] | None


def product_of_logger(logger: Any) -> Product | None:
    """Of a Lightning logger: its own methods, as W&B's, or those of its client, as MLflow's."""
    client: Any = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        return Product(
            lambda key, picture, step: logger.log_image(key, [picture], step=step),
            (
                lambda key, text, step: logger.log_text(
                    key, columns=["step", "findings"], data=[[step, text]]
                )
            )
            if hasattr(logger, "log_text")
            else None,
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
    """Of a Hugging Face callback that reports: W&B's or MLflow's, once its run has begun."""
    wandb: Any = getattr(callback, "_wandb", None)
    mlflow: Any = getattr(callback, "_ml_flow", None)
    if getattr(wandb, "run", None) is not None:
        axis = "train/global_step"  # along which W&B draws what this callback logs

        def log_text(key: str, text: str, step: int) -> None:
            table = wandb.Table(columns=["step", "findings"], data=[[step, text]])
            wandb.log({key: table, axis: step})

        return Product(
            lambda key, picture, step: wandb.log({key: wandb.Image(picture), axis: step}), log_text
        )
    run = mlflow.active_run() if hasattr(mlflow, "active_run") else None
    if run is None:
        return None
    # The callback leaves figures to a thread, and a run whose figures are half written can't be
    # read, which logging a file begins with.
    wait = getattr(mlflow, "flush_async_logging", _no_wait)
    return _mlflow(mlflow.MlflowClient(), run.info.run_id, wait)


def _no_wait() -> None:
    """All is written already."""


def _mlflow(client: Any, run: str, wait: Callable[[], None] = _no_wait) -> Product:
    """Files of the run, each in place of the last one."""

    def log_picture(key: str, picture: Any, step: int) -> None:
        wait()
        client.log_image(run, picture, artifact_file=f"{key}.png")

    def log_text(key: str, text: str, step: int) -> None:
        wait()
        client.log_text(run, text, artifact_file=f"{key}.md")

    return Product(log_picture, log_text)


class ProductSink:
    """Pictures, and findings as text, where a product takes them; when they are due.

    Args:
        product: where they go.
        owner: the class that warns where pictures can't be drawn.
        name: tells several monitors of one run apart, as in `TensorBoardSink`.
    """

    def __init__(self, product: Product, owner: str, name: str = "") -> None:
        self._product = product
        self._name = name
        self._board = Board(owner)
        self._last = 0

    def write(self, report: StepReport, step: int | None = None) -> None:
        """Take a report, at the step that the product counts."""
        self._last = report.step if step is None else step
        if self._board.add(report):
            self._log()

    def add_losses(self, losses: Mapping[int, float]) -> None:
        """Take the losses of the steps after the last report."""
        self._board.add_losses(losses)

    def close(self) -> None:
        """Log the last pictures."""
        if self._board.is_behind:
            self._log()

    def _log(self) -> None:
        group = f"adiv.summary.{self._name}" if self._name else "adiv.summary"
        with self._board.showing():
            findings = self._board.findings()
            if self._product.log_text is not None:
                text = alarms_text(self._board.alarms) + findings_text(findings, self._board.record)
                self._product.log_text(f"{group}/findings", text, self._last)
            if self._board.draws:
                for tag, png in self._board.pictures(findings, self._name).items():
                    self._product.log_picture(tag, _opened(png), self._last)


def _opened(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))
