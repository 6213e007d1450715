"""Reports in TensorBoard: heat maps, findings, scalars."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Union

from adiv_monitor.diagnosis.health import chart_text
from adiv_monitor.files import needs
from adiv_monitor.pages.layers import worst_lines
from adiv_monitor.printable import markdown
from adiv_monitor.report import StepReport
from adiv_monitor.report.wording import not_measured, percent, trained
from adiv_monitor.sinks.board import NO_PICTURES, BoardSink, findings_text, pictures
from adiv_monitor.sinks.scalars import DEFAULT_MEASURES, FRONT_MEASURES, Scalars, summary_group

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(BoardSink):
    """Writes reports for TensorBoard.

    - Images: `adiv/overview`, with the verdict in words and the measures that show most; and
      `adiv/per_layer/<measure>`, layers × steps in the network's order, coloured by what healthy
      networks read if that is known. Each picture shows the whole run, so the last one counts.
      Drawing takes at most a twentieth of the time since the first report; `close` draws once more.
    - Text: `adiv.summary/findings`, what the audit's rules find in these reports alone, with fixes;
      the worst layers, if standard errors tell which these are; what was not measured; alarms and
      notes. Each is written when it changes.
    - Scalars: `adiv.summary/<measure>_min`, `…_median` and `…_max` over the layers, the coverage,
      and `adiv.<measure>/<block>`, medians over the layers of at most eight blocks of the network;
      with `scalars="all"`, `adiv.<measure>/<module path>` of every layer instead. A value without a
      direction is NaN. Charts say what healthy layers read, if that is known.

    Args:
        target: folder for the event files, or a `SummaryWriter` of yours, which stays open at
            `close`.
        measures: the measures that become scalars. None: those that tell faulty runs from healthy
            ones, and of every layer a selection.
        scalars: "few", or "all" for those of every layer.
        name: tells several monitors apart that write into one run: the summary goes to
            `adiv.summary.<name>/…`, pictures to `adiv/…/<name>`.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: the target is neither a path nor a `SummaryWriter`.
        ValueError: there is no measure of that name, or no such choice of scalars.

    Warns:
        UserWarning: matplotlib, whose fonts pictures need, is not installed.
    """

    def __init__(
        self,
        target: Union[str, os.PathLike[str], "SummaryWriter"],
        measures: Iterable[str] | None = None,
        *,
        scalars: Scalars = "few",
        name: str = "",
    ) -> None:
        super().__init__(measures, scalars, _encodable(name))
        self._owned = isinstance(target, str | os.PathLike)
        self._writer = _writer(target)
        self._texts: dict[str, str] = {}
        self._described_tags: set[str] = set()

    @property
    def place(self) -> str:
        """Folder of the event files, for the closing line of a run; "" if nothing was written."""
        return str(self._writer.log_dir) if self.count else ""

    def write(self, report: StepReport) -> None:
        """Write the report and flush it to the event file."""
        from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
            Summary,
        )

        # Six digits, so that rounding noise does not fill the chart of a constant.
        values = [
            Summary.Value(
                tag=_encodable(tag), simple_value=float(f"{v:.6g}"), metadata=self._described(tag)
            )
            for tag, v in self._metrics.board(report).items()
        ]
        # One event for all values: the writer's own methods pass every single value to another
        # thread, which takes ten times as long.
        self._file_writer().add_summary(Summary(value=values), report.step)
        self._step = report.step
        super().write(report)
        self._write_texts(report)
        self._writer.flush()

    def close(self) -> None:
        """Write the last pictures, and close the event file if the sink opened it."""
        self.flush()
        if self._owned:
            self._writer.close()

    def _described(self, tag: str) -> Any:
        """Return the metadata of a chart's first value: the range of healthy layers."""
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, SummaryMetadata

        reads = "" if tag in self._described_tags else chart_text(tag)
        self._described_tags.add(tag)
        return (
            None
            if not reads
            else SummaryMetadata(
                plugin_data={"plugin_name": "scalars"},
                data_class=DATA_CLASS_SCALAR,
                summary_description=markdown(reads),
            )
        )

    def _file_writer(self) -> Any:
        return self._writer._get_file_writer()  # type: ignore[no-untyped-call]

    def show(self) -> None:
        """Write findings and pictures of the training so far."""
        record, findings = self.running.record(), self.running.findings()
        self._write_text("findings", findings_text(findings, record), self._step)
        if self.draws:
            for tag, png in pictures(record, findings, self._metrics.name).items():
                self._file_writer().add_summary(_image(tag, png), self._step)
        else:
            self._write_text("no_pictures", NO_PICTURES, self._step)
        self._writer.flush()

    def _write_texts(self, report: StepReport) -> None:
        measures = self._metrics.measures or (*FRONT_MEASURES, *DEFAULT_MEASURES)
        if report.ends_round:  # single turns would change these texts each time
            whole = self.running.last
            self._write_text("worst_layers", "\n".join(worst_lines(whole, measures)), report.step)
            self._write_text("not_measured", _not_measured(whole), report.step)
        self._write_text("notes", _bullets(report.notes), report.step)
        self._write_text("alarms", _bullets(map(str, report.alarms)), report.step)

    def _write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text if it has changed."""
        if self._texts.get(tag, "") != text:
            group = summary_group(self._metrics.name)
            self._writer.add_text(f"{group}/{tag}", text or "none any more", step)
            self._texts[tag] = text


def as_writer(found: object) -> Union["SummaryWriter", None]:
    """Return the argument if it is a writer that `TensorBoardSink` accepts, else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return found if isinstance(found, SummaryWriter) else None


def _writer(target: object) -> "SummaryWriter":
    if (writer := as_writer(target)) is not None:
        return writer
    needs("TensorBoardSink", ["tensorboard"], '"adiv-monitor[tensorboard]"')
    from torch.utils.tensorboard import SummaryWriter

    if isinstance(target, str | os.PathLike):
        return SummaryWriter(os.fspath(target))
    raise TypeError(
        f"TensorBoardSink: got a {type(target).__module__}.{type(target).__name__}, expected a "
        "folder or a torch.utils.tensorboard.SummaryWriter"
    )


def _encodable(name: str) -> str:
    """Return the name with lone surrogates, which event files can't hold, as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _image(tag: str, png: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))  # in the PNG header
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _not_measured(report: StepReport) -> str:
    head = f"{percent(report.coverage)} of {trained(report)} are in measured layers.\n\n"
    return head + _bullets(not_measured(report, as_code=True))


def _bullets(lines: Iterable[str]) -> str:
    """Format a Markdown list in which `__main__` and `<locals>` are neither bold nor a tag."""
    return "\n".join(f"- {markdown(line)}" for line in lines)
