"""A page about a running training, rewritten while it goes on."""

import os

from adiv_monitor.files import file_path, needs, write_whole
from adiv_monitor.pages import beside, is_ours, running_files
from adiv_monitor.sinks.course import CourseSink

_BESIDE = (".json", ".md")
_FIRST = 1.5  # seconds, on the slower of two processors: imports and the page of a small net


class HtmlSink(CourseSink):
    """Writes the run so far as one HTML page: verdict, alarms, heat map, layers.

    It is the audit's page without what only an audit can know. The file holds everything, loads
    nothing over a network, and is always replaced as a whole. It is rewritten at reports, for at
    most a twentieth of the time since the first one, so that it exists after about a minute; and at
    `flush` and `close`. Reload it to see how the training goes on.

    Beside `run.html` it writes `run.json`, which `adiv-monitor compare` and `AuditReport.from_json`
    read, and `run.md`, the same in at most 200 lines, to paste into an issue.

    Args:
        path: the file. Missing folders are made; an existing file or link is replaced. Something
            else there, as a pipe, is an error when the page is written.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        TypeError, IsADirectoryError: the path is not a path, or that of a folder.
        FileExistsError: a file beside the page was not written by this package.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        needs("HtmlSink", ["jinja2", "matplotlib"])
        self._path = file_path("HtmlSink", path)
        for other in (beside(self._path, ending) for ending in _BESIDE):
            if not is_ours(other):
                raise FileExistsError(
                    f"HtmlSink(path=…): got {self._path}, beside which it would write {other}, "
                    "which it did not write: expected another name"
                )
        super().__init__(_FIRST)

    @property
    def place(self) -> str:
        """Path of the page, for the closing line of a run; "" if it was never written."""
        return str(self._path) if self.shown else ""

    def named(self, name: str) -> "HtmlSink":
        """Return the sink of one of several monitors, whose page has its name, too."""
        return HtmlSink(self._path.with_stem(f"{self._path.stem}-{name}"))

    def show(self) -> None:
        """Write the page with all reports so far, and the files beside it."""
        run = self.running
        texts = running_files(run.record(), run.findings(), run.count, run.alarms)
        files = {beside(self._path, ending): texts[ending] for ending in _BESIDE}
        write_whole({self._path: texts[".html"], **files})
