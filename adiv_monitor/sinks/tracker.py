"""Reports in trackio or W&B: scalars, pictures, findings in words, and alerts."""

import io
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Literal

from adiv_monitor.printable import printable
from adiv_monitor.report import StepReport
from adiv_monitor.sinks.board import BoardSink, findings_text, pictures
from adiv_monitor.sinks.scalars import Scalars, summary_group

_LEVELS = {"act": "ERROR", "watch": "WARN", "note": "INFO"}
_STEP = "adiv.step"  # in W&B, the measured step, over which charts are drawn


class TrackerSink(BoardSink):
    """Writes to the run that `trackio.init` or `wandb.init` has begun, and leaves it open.

    Scalars are those of `TensorBoardSink`. In W&B they lie over `adiv.step`, in the row that your
    next log completes, so that none is lost; if no log of yours comes between two reports, they
    are rows of their own, and W&B's count of your later rows is higher by these. Pictures and
    findings are written as rarely as there, and at `close`. A finding that is new by then, or of
    another strength, is an alert: `act` as ERROR, `watch` as WARN, `note` as INFO. Findings as
    Markdown go to trackio only.

    Args:
        product: "trackio" or "wandb".
        measures: the measures that become scalars, as in `TensorBoardSink`.
        scalars: "few", "all", or "none", where a logger writes them already.
        name: tells several monitors of one run apart, as in `TensorBoardSink`.

    Raises:
        ImportError: the product is not installed.
        ValueError: there is no such product, measure or choice of scalars.
    """

    def __init__(
        self,
        product: str,
        measures: Iterable[str] | None = None,
        *,
        scalars: Scalars | Literal["none"] = "few",
        name: str = "",
    ) -> None:
        if product not in ("trackio", "wandb"):
            raise ValueError(f"TrackerSink: got {product!r}, expected 'trackio' or 'wandb'")
        super().__init__(measures, "few" if scalars == "none" else scalars, name)
        self._scalars = scalars != "none"
        self._product = product
        self._client: Any = import_module(product)
        self._row: int | None = None  # the step of W&B that holds our last scalars
        self._told: dict[str, str] = {}  # finding → its strength

    def write(self, report: StepReport) -> None:
        """Log the report's scalars, and pictures, findings and alerts if these are due."""
        self._step = report.step
        if self._scalars:
            self._log(self._metrics.board(report))
        super().write(report)

    def show(self) -> None:
        """Log pictures and findings of all reports so far, and alert of those that are new."""
        client, record, findings = self._client, self.running.record(), self.running.findings()
        shown: dict[str, Any] = {}
        if self.draws:
            from PIL import Image

            drawn = pictures(record, findings, self._metrics.name)
            shown = {tag: client.Image(Image.open(io.BytesIO(png))) for tag, png in drawn.items()}
        if hasattr(client, "Markdown"):
            text = client.Markdown(findings_text(findings, record))
            shown[f"{summary_group(self._metrics.name)}/findings"] = text
        self._log(shown)
        for finding in findings:
            if self._told.get(finding.name) != finding.strength:
                level = client.AlertLevel[_LEVELS[finding.strength]]
                client.alert(finding.name, printable(finding.summary), level)
        self._told = {finding.name: finding.strength for finding in findings}

    def _log(self, content: dict[str, Any]) -> None:
        """Log at the measured step; in W&B in the row that the user's next log completes."""
        if self._product == "trackio":  # beside a logger that counts for itself, at its count
            self._client.log(content, step=self._step if self._scalars else None)
            return
        run = self._client.run
        if self._row is None:
            run.define_metric("adiv*", step_metric=_STEP)
        elif self._row == run.step:  # nothing was logged since: what we logged would be replaced
            run.log({}, commit=True)
        run.log({**content, _STEP: self._step}, commit=False)
        self._row = run.step
