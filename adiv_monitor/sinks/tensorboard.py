"""Reports in TensorBoard: scalars, histograms over rows, text, and charts of all layers in one."""

import html
import math
import os
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Union

from adiv_monitor.report import WORST, StepReport
from adiv_monitor.sinks.scalars import (
    DEFAULT_MEASURES,
    known_measures,
    layer_scalars,
    summary_scalars,
    taken,
)
from adiv_monitor.sinks.wording import listed, not_measured, percent

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_ROUNDING = 1e-6  # a few units in the last place of float32


class TensorBoardSink:
    """Writes reports for TensorBoard.

    - Scalars: `adiv.<measure>/<module path>`, and `adiv.summary/<measure>_min`, `…_median` and
      `…_max` over the layers. A measure that has no direction (NaN) is written as NaN, which
      TensorBoard draws as a triangle where the line has a gap.
    - Histograms: `adiv.row_scale/<module path>` and `adiv.row_cosine/<module path>`, rebuilt from
      the report's quantiles.
    - Text: the worst layer of each measure, where the standard errors tell which that is; what was
      not measured, alarms and notes, when they change.
    - Custom scalars: one chart per measure with all layers in it.

    Args:
        target: folder for the event files, or a `SummaryWriter` of yours, which stays open at
            `close`.
        measures: which measures become scalars.
        histograms: whether to write the histograms.
        name: tells several monitors that write into one run apart: the summary goes to
            `adiv.summary.<name>/…`.

    Raises:
        ImportError: without the package tensorboard.
        TypeError: when the target is neither.
        ValueError: when there is no measure of that name.
    """

    def __init__(
        self,
        target: Union[str, os.PathLike[str], "SummaryWriter"],
        measures: Iterable[str] = DEFAULT_MEASURES,
        *,
        histograms: bool = True,
        name: str = "",
    ) -> None:
        self._measures = known_measures(measures)
        self._histograms = histograms
        self._name = name
        self._owned = isinstance(target, str | os.PathLike)
        self._writer = _writer(target)
        self._texts: dict[str, str] = {}
        self._has_layout = False

    def write(self, report: StepReport) -> None:
        """Write the report and let TensorBoard see it."""
        from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
            Summary,
        )

        if not self._has_layout:
            shown = taken(report, self._measures) or self._measures
            self._writer.add_custom_scalars(_layout(shown))
            self._has_layout = True
        scalars = layer_scalars(report, self._measures)
        scalars.update(summary_scalars(report, self._measures, self._name))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        if self._histograms:
            values += _histograms(report)
        # One event for all: the writer's own methods hand every single value to another thread,
        # which takes ten times as long.
        file_writer = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
        file_writer.add_summary(Summary(value=values), report.step)
        self._write_texts(report)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file, if it is this sink's own."""
        if self._owned:
            self._writer.close()

    def _write_texts(self, report: StepReport) -> None:
        """The worst layers of every report; what seldom changes only when it does."""
        group = f"adiv.summary.{self._name}" if self._name else "adiv.summary"
        self._writer.add_text(
            f"{group}/worst_layers", _worst_layers(report, self._measures), report.step
        )
        for tag, text in (
            ("not_measured", _not_measured(report)),
            ("notes", _bullets(report.notes)),
            ("alarms", _bullets(map(str, report.alarms))),
        ):
            if self._texts.get(tag, "") != text:
                self._writer.add_text(f"{group}/{tag}", text or "none any more", report.step)
                self._texts[tag] = text


def as_writer(found: object) -> Union["SummaryWriter", None]:
    """What was found, if it is a writer that `TensorBoardSink` takes; else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return found if isinstance(found, SummaryWriter) else None


def _writer(target: object) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            'TensorBoardSink needs the package tensorboard: pip install "adiv-monitor[tensorboard]"'
        ) from error
    if isinstance(target, SummaryWriter):
        return target
    if isinstance(target, str | os.PathLike):
        return SummaryWriter(os.fspath(target))
    raise TypeError(
        f"TensorBoardSink: got a {type(target).__module__}.{type(target).__name__}, expected a "
        "folder or a torch.utils.tensorboard.SummaryWriter"
    )


def _layout(measures: tuple[str, ...]) -> dict[str, dict[str, list[Any]]]:
    """One chart per measure, collecting the layers' scalars by the beginning of their tags."""
    layers = {m: ["Multiline", [re.escape(f"adiv.{m}/")]] for m in measures}
    summary = {
        m: ["Multiline", [rf"adiv\.summary(\.[^/]+)?/{re.escape(m)}_(min|median|max)$"]]
        for m in measures
    }
    return {"adiv: all layers": layers, "adiv: smallest, median and largest": summary}


def _histograms(report: StepReport) -> Iterator[Any]:
    """Of every layer, how scale and cosine are distributed over the rows that have a gradient."""
    for path, reading in report.layers.items():
        rows = reading.rows_seen - reading.rows_without_gradient
        for tag, quantiles in (
            (f"adiv.row_scale/{path}", reading.scale_quantiles),
            (f"adiv.row_cosine/{path}", reading.row_cosine_quantiles),
        ):
            if quantiles and all(map(math.isfinite, quantiles)):
                yield from _histogram(tag, quantiles, rows).value


def _histogram(tag: str, quantiles: tuple[float, ...], rows: int) -> Any:
    """One bucket between two neighbouring quantiles, all equally full."""
    from torch.utils.tensorboard.summary import histogram_raw

    if math.isclose(quantiles[0], quantiles[-1], rel_tol=_ROUNDING):
        # Stretched over the whole chart, rounding would look like a distribution, or a movement.
        quantiles = (float(f"{quantiles[0]:.6g}"),) * len(quantiles)
    middles = [(low + high) / 2 for low, high in pairwise(quantiles)]
    share = rows / len(middles)
    return histogram_raw(  # type: ignore[no-untyped-call]
        tag,
        min=quantiles[0],
        max=quantiles[-1],
        num=rows,
        sum=share * sum(middles),
        sum_squares=share * sum(middle**2 for middle in middles),
        bucket_limits=list(quantiles[1:]),
        bucket_counts=[share] * len(middles),
    )


def _worst_layers(report: StepReport, measures: tuple[str, ...]) -> str:
    """A Markdown table: per measure, the layer at its bad end (both ends where none is bad)."""
    rows = []
    for measure, summary in report.summary().items():
        if measure not in measures:
            continue
        low = _extreme(report, measure, summary.min_layers, summary.min)
        high = _extreme(report, measure, summary.max_layers, summary.max)
        ends = {"min": low, "max": high, None: f"no bad end: from {low} to {high}"}
        rows.append(f"| {measure} | {ends[WORST.get(measure)]} |")
    return "\n".join(["| measure | worst layer |", "| --- | --- |", *rows])


def _extreme(report: StepReport, measure: str, layers: tuple[str, ...], value: float) -> str:
    """The layer and its value, or those that may be the one and what fits them."""
    names = listed(list(layers), "`")
    if len(layers) > 1:
        return f"one of {names}, near {value:.3g}"
    error = report.readings(measure)[layers[0]].standard_error.get(measure, 0.0)
    return f"{names} {value:.3g}" + (f" ± {error:.1g}" if error else "")


def _not_measured(report: StepReport) -> str:
    head = f"{percent(report.coverage)} of the trained parameters are in measured layers.\n\n"
    return head + _bullets(not_measured(report, quote="`"))


def _bullets(lines: Iterable[str]) -> str:
    """A Markdown list; between code, `__main__` and `<locals>` are neither bold nor a tag."""
    items = []
    for line in lines:
        parts = line.split("`")
        parts[::2] = [html.escape(p, quote=False).replace("_", r"\_") for p in parts[::2]]
        items.append("- " + "`".join(parts))
    return "\n".join(items)
